"""Time of a step of the quickstart in a rank, compared with the same script under torchrun.

Also the tensors that are alive at once, and the cost of tpunb.log and tpunb.track, of the check
that a run makes at each step, and of the training helpers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
from nbformat import v4

from benchmarks.commands import TPUNB, run, told_by, torchrun
from benchmarks.kernel import Kernel
from benchmarks.table import Samples, met, table

STEPPING = Path(__file__).with_name("stepping.py")
QUICKSTART = Path(__file__).parent.parent / "notebooks" / "00_quickstart.ipynb"
WARM_UP = 3
"""Epochs that are not counted, one for each of KINDS: they compile."""
WORDS = "steps took"

# The train cell with a clock. One of three epochs has no tpunb.log, which prints under torchrun and
# writes a file in a run, so it shows the cost of the processes themselves. Another epoch has
# tpunb.track as well.
BEGIN = """\
%%tpu_train --cores {ranks}
import statistics
import time

kinds = ["logged", "bare", "tracked"]
times = {kind: [] for kind in kinds}
"""
LOG = "        tpunb.log(step=step, loss=loss)\n"
COUNT = "        step += 1\n"
LOOP = "    for x, y in batches(order, rank, world):\n"
REPLACED = {
    LOOP: """\
    kind = kinds[epoch % 3]
    loop = batches(order, rank, world)
    if kind == "tracked":
        loop = tpunb.track(loop, total=len(order) // batch_size)
    for x, y in loop:
""",
    LOG: f"        if kind != 'bare':\n    {LOG}",
    # The time between two epochs is not part of a step.
    COUNT: f"""{COUNT}\
        now = time.perf_counter()
        if epoch >= {WARM_UP} and step % (len(order) // batch_size) != 1:
            times[kind].append(1000 * (now - before))
        before = now
""",
}
END = f"""
def most_megabytes():
    import gc

    most, layer = 0, nn.Linear(1024, 1024).to(device)
    optimizer = torch.optim.SGD(layer.parameters())
    for x in tpunb.track(map(torch.ones, [(1024, 1024)] * 5), total=5):
        out = layer(x.to(device))
        loss = out.mean()
        loss.backward()
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        most = max(most, sum(each.nbytes for each in tensors) / 1e6)
        optimizer.step()
        optimizer.zero_grad()
        tpunb.log(loss=loss)
        torch_xla.sync()
        del x, out, loss, tensors
    return most

times["alive"] = [most_megabytes()]
if rank == 0:
    for kind, each in times.items():
        print("{WORDS}", kind, statistics.median(each), statistics.fmean(each), flush=True)"""

KINDS = {"logged": "as it is", "bare": "without tpunb.log", "tracked": "with tpunb.track too"}
ALIVE = {"alive": "MB of tensors at once"}
Taken = dict[str, tuple[float, float]]
"""For each of KINDS, median and mean of the steps of one process, in milliseconds; and ALIVE."""


HELPERS = {
    "looked": ("the look at each step of a run", "bare"),
    "noted": ("the note of each optimizer's step", "bare"),
    "dropped": ('shard, remainder="drop"', "bare"),
    "masked": ("shard and masked_loss", "bare masked"),
    "accumulated": ("Accumulation of four pieces", "bare pieces"),
}
"""Ways of stepping.py: a label, and the bare way to compare with."""


def measure(folder: Path, rounds: int, epochs: int, sizes: tuple[int, ...], samples: int) -> str:
    """Measure all alternately, `rounds` times for each number of ranks; returns tables."""
    return f"{_quickstart(folder, rounds, epochs, sizes)}\n\n{_helpers(folder, rounds, samples)}"


def _quickstart(folder: Path, rounds: int, epochs: int, sizes: tuple[int, ...]) -> str:
    notebook = folder / "step.ipynb"
    cells = _write(notebook, WARM_UP + epochs)
    run([TPUNB, "convert", str(notebook), "-o", "step.py"], folder)

    found: dict[tuple[str, str, int], tuple[Samples, Samples]] = {}
    with Kernel(notebook) as kernel:
        for index in range(cells - 1):
            kernel.cell(index)
        kernel.wait_until_warm()

        def in_a_run(size: int) -> Taken:
            kernel.do(f"ranks = {size}")
            return _parse_times(kernel.cell(cells - 1).printed())

        def under_torchrun(size: int) -> Taken:
            # torchrun gives each of several processes one thread, a run gives each its share.
            threads = max(1, len(os.sched_getaffinity(0)) // size)
            env = {"OMP_NUM_THREADS": str(threads)}
            return _parse_times(run(torchrun(size, "step.py"), folder, env=env).text)

        variants = [("run", in_a_run), ("torchrun", under_torchrun)]
        for _ in range(rounds):
            for size in sizes:
                for where, step in variants:
                    for kind, values in step(size).items():
                        pair = found.setdefault((where, kind, size), (Samples(), Samples()))
                        for samples, value in zip(pair, values, strict=True):
                            samples.add([value])
            variants.reverse()  # so that a drift of the machine affects both alike
    return _report(found, sizes)


def _write(path: Path, epochs: int) -> int:
    """Write the quickstart up to its train cell, with a clock; return its number of code cells."""
    nb = nbformat.read(QUICKSTART, as_version=4)
    cells: list[Any] = []
    for cell in nb.cells:
        if cell.cell_type != "code" or cell.source.startswith("%%tpu_debug"):
            continue
        cells.append(cell)
        if "parameters" in cell.metadata.get("tags", []):
            cells.append(v4.new_code_cell(f"epochs = {epochs}"))
        if cell.source.startswith("%%tpu_train"):
            body = cell.source.partition("\n")[2]
            for old, new in REPLACED.items():
                if body.count(old) != 1:
                    raise AssertionError(
                        f"the quickstart's train cell has changed: it needs exactly one {old!r}"
                    )
                body = body.replace(old, new)
            cell.source = BEGIN + body + END
            break
    nb.cells = cells
    nbformat.write(nb, path)
    return len(cells)


def _parse_times(text: str) -> Taken:
    """Parse the times that the train cell printed at its end."""
    lines = [line.partition(WORDS)[2].split() for line in text.splitlines() if WORDS in line]
    found = {kind: (float(median), float(mean)) for kind, median, mean in lines}
    if found.keys() != (KINDS | ALIVE).keys():
        raise AssertionError(f"the train cell did not print its times:\n{text}")
    return found


def _report(
    found: dict[tuple[str, str, int], tuple[Samples, Samples]], sizes: tuple[int, ...]
) -> str:
    rows = [("ranks", "train cell", "in a run", "torchrun", "ratio", "of means", "goal ≤ 1.01")]
    for size in sizes:
        for kind, label in (KINDS | ALIVE).items():
            mine, my_mean = found["run", kind, size]
            theirs, their_mean = found["torchrun", kind, size]
            ratio, of_means = mine.over(theirs), my_mean.over(their_mean)
            rows.append(
                (
                    str(size),
                    label,
                    mine.text(2),
                    theirs.text(2),
                    ratio.text(3),
                    of_means.text(3),
                    met(ratio, most=1.01),
                )
            )
    watched = [("ranks", "in a run", "over bare code", "of means", "goal")]
    for size in sizes:
        bare, bare_mean = found["run", "bare", size]
        for kind, label, most in (
            ("logged", "tpunb.log", 1.02),
            ("tracked", "tpunb.log and tpunb.track", 1.03),
        ):
            mine, my_mean = found["run", kind, size]
            ratio, of_means = mine.over(bare), my_mean.over(bare_mean)
            watched.append(
                (
                    *(str(size), label, ratio.text(3), of_means.text(3)),
                    f"≤ {most} {met(ratio, most=most)}",
                )
            )
    return (
        "Step: milliseconds of a step of the quickstart's training, in a rank of a run and in\n"
        "the same script under torchrun; and what is alive in a function with a loop.\n\n"
        + table(rows)
        + "\n\nThe cost of tpunb.log in every step and of tpunb.track around them, in a run.\n\n"
        + table(watched)
    )


def _helpers(folder: Path, rounds: int, samples: int) -> str:
    steps: dict[str, Samples] = {}
    for _ in range(rounds):
        processors = len(os.sched_getaffinity(0))
        for name, values in told_by(STEPPING, folder, 1, processors, 8, samples).items():
            steps.setdefault(name, Samples()).add([1000 * value for value in values])
    rows = [("a step", "processor ms", "bare code", "ratio", "goal")]
    for name, (label, beside) in HELPERS.items():
        mine, bare = steps[name], steps[beside]
        ratio = mine.over(bare)
        most = 1.1 if name == "accumulated" else 1.02
        goal = f"≤ {most} {met(ratio, most=most)}"
        rows.append((label, mine.text(2), bare.text(2), ratio.text(3), goal))
    return (
        "The cost of tpunb in a training step of one rank, compared with a DataLoader with a\n"
        "DistributedSampler; processor time of all its threads.\n\n" + table(rows)
    )
