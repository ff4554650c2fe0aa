"""`make bench BACKEND=torchtpu`: TorchTPU rehearsed, and plain torch.

Seconds to the first line of a rank, and the quickstart's training on two ranks beside torchrun. It
runs in an environment without torch_xla.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import nbformat
from nbformat import v4

from benchmarks import rehearsed_device
from benchmarks.commands import run, torchrun
from benchmarks.kernel import Kernel
from benchmarks.table import Samples, met, table

QUICKSTART = Path(__file__).parent.parent / "notebooks/torchtpu/00_quickstart.ipynb"
RANKS = 2
BACKENDS = ("torchtpu", "torch")
PRELUDES = {
    "empty": "import torch",
    "heavy": """\
import pandas
import sklearn.linear_model
import torch
import transformers

images = torch.rand(100_000_000)  # 400 MB
columns = pandas.DataFrame(images[:1_000_000].view(-1, 10).numpy()).describe()
for _ in range(20):
    product = torch.rand(1000, 1000) @ torch.rand(1000, 1000)""",
}
HERE = "is here"
SETUP = "%load_ext tpunb\n%tpu_setup --backend {backend}"
FIRST = f'%%tpu_train --cores {RANKS}\nprint("a rank", "{HERE}", flush=True)'
TOOK = "the loop took"
ON_CPU = {'"tpu_dist"': '"gloo"', 'torch.device("tpu")': 'torch.device("cpu")'}
"""What the quickstart's train cell has for TorchTPU, and what it is on the CPU."""
LOOP = "for epoch in range(epochs):\n"
AFTER = "# Each core takes every world-th test image."
LOG = "        tpunb.log(step=step, loss=loss)\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torchtpu")
    parser.add_argument("--rounds", type=int, default=4, help="number of rounds of each (4)")
    parser.add_argument("--quick", action="store_true", help="one round of little work")
    options = parser.parse_args()
    rounds, starts, epochs = (1, 2, 2) if options.quick else (options.rounds, 5, 12)
    print(
        f"tpunb {version('tpunb')}, torch {version('torch')}, {os.cpu_count()} processors, load "
        f"{os.getloadavg()[0]:.1f} at the start.\n"
        "All measured alternately: median, and in brackets the lowest and the highest.\n"
    )
    with tempfile.TemporaryDirectory(prefix="tpunb-bench-", ignore_cleanup_errors=True) as made:
        print(_first_lines(Path(made), rounds, starts) + "\n", flush=True)
        print(_trainings(Path(made), rounds, epochs) + "\n", flush=True)
    print(rehearsed_device.measure(*((1, 3) if options.quick else (7, 20))) + "\n", flush=True)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


def _first_lines(folder: Path, rounds: int, starts: int) -> str:
    seconds: dict[tuple[str, str], Samples] = {}
    for kind, prelude in PRELUDES.items():
        with Kernel(_write(folder / f"{kind}.ipynb", [SETUP, prelude, FIRST])) as kernel:
            for _ in range(rounds):
                for backend in BACKENDS:
                    kernel.do(f"backend = {backend!r}")
                    kernel.cell(0)
                    kernel.cell(1)
                    kernel.wait_until_warm()
                    kernel.cell(2)  # runs the prelude, which is kept
                    ran = [kernel.cell(2, await_words=[HERE]) for _ in range(starts)]
                    taken = [each.found - each.sent for each in ran if each.found is not None]
                    seconds.setdefault((backend, kind), Samples()).add(taken)
    rows = [("backend", "prelude", "seconds", "goal ≤ 0.25")]
    rows += [(*key, found.text(2), met(found, most=0.25)) for key, found in seconds.items()]
    head = f"From sending the train cell to the first line of one of {RANKS} ranks."
    return f"{head}\n\n{table(rows)}"


def _trainings(folder: Path, rounds: int, epochs: int) -> str:
    *above, train = _quickstart(epochs)
    on_cpu, bare = train, train.replace(LOG, "").replace("import tpunb\n", "")
    for tpu, cpu in ON_CPU.items():
        on_cpu, bare = on_cpu.replace(tpu, cpu), bare.replace(tpu, cpu)
    (folder / "bare.py").write_text("\n".join([*above, bare]))
    seconds: dict[str, Samples] = {}
    kernels: dict[str, Kernel] = {}
    for name, cell in {"torchtpu": train, "torch": on_cpu}.items():
        cells = ["%load_ext tpunb", *above, f"%%tpu_train --cores {RANKS}\n{cell}"]
        kernels[name] = Kernel(_write(folder / f"train-{name}.ipynb", cells))
    with kernels["torchtpu"], kernels["torch"]:
        for kernel in kernels.values():
            for index in range(len(above) + 1):
                kernel.cell(index)
        for _ in range(rounds):
            for name in (*kernels, "torchrun"):
                if name in kernels:
                    printed = kernels[name].cell(len(above) + 1).printed()
                else:
                    threads = max(1, len(os.sched_getaffinity(0)) // RANKS)
                    env = {"OMP_NUM_THREADS": str(threads)}
                    printed = run(torchrun(RANKS, "bare.py"), folder, env=env).text
                [line] = [line for line in printed.splitlines() if TOOK in line]
                seconds.setdefault(name, Samples()).add([float(line.split()[-1])])
    labels = {
        "torchtpu": "%%tpu_train, TorchTPU rehearsed",
        "torch": "%%tpu_train, gloo on the CPU",
        "torchrun": "torchrun, gloo on the CPU, without tpunb",
    }
    rows = [(f"{epochs} epochs", "seconds", "over torchrun", "goal")]
    for name, label in labels.items():
        ratio, most = seconds[name].over(seconds["torchrun"]), 1.15 if name == "torchtpu" else 1.0
        goal = "" if name == "torchrun" else f"≤ {most} {met(ratio, most=most)}"
        rows.append((label, seconds[name].text(2), ratio.text(2), goal))
    return f"The loop of the quickstart's training on {RANKS} ranks.\n\n{table(rows)}"


def _quickstart(epochs: int) -> list[str]:
    """Return the quickstart's cells up to the train cell, which prints how long its loop took."""
    sources: list[str] = []
    for cell in nbformat.read(QUICKSTART, as_version=4).cells:
        source = str(cell.source)
        if cell.cell_type != "code" or source.startswith(("%load_ext", "%%tpu_debug")):
            continue
        if not source.startswith("%%tpu_train"):
            more = f"\nepochs = {epochs}" if "parameters" in cell.metadata.get("tags", []) else ""
            sources.append(source + more)
            continue
        body = source.partition("\n")[2]
        for part in (LOOP, AFTER, LOG, *ON_CPU):
            assert body.count(part) == 1, f"the quickstart's train cell has changed: {part!r}"
        body = body.partition(AFTER)[0].replace(
            LOOP, f"import time\n\ndist.barrier()\nbegan = time.perf_counter()\n{LOOP}"
        )
        told = f'print("{TOOK}", time.perf_counter() - began, flush=True)'
        return [*sources, f"{body}\ndist.barrier()\nif rank == 0:\n    {told}"]
    raise AssertionError(f"{QUICKSTART} has no train cell")


def _write(path: Path, sources: list[str]) -> Path:
    cells = [v4.new_code_cell(source) for source in sources]
    nbformat.write(v4.new_notebook(cells=cells), path)
    return path


if __name__ == "__main__":
    main()
