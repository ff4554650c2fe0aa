"""What grows with a notebook: the first line of a run, the cells themselves, outputs, `--ahead`.

And what a kernel does while its user waits: it runs a prelude ahead, and supervises an idle run.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import nbformat
from nbformat import v4

from benchmarks.kernel import Kernel
from benchmarks.table import Samples, met, table
from tests.drivers.kernel import until
from tests.support import is_kept
from tpunb.utils import processes

CELLS = 300
OUTPUTS = 50_000_000
"""Bytes of outputs in the notebook's file."""
WORDS = "is here"
_PRELUDE = "import time\nend = time.time() + {seconds}\nwhile time.time() < end:\n    pass"
_SUPERVISOR = (
    "print(get_ipython().magics_manager.registry['TpuMagics'].session.runs.launcher.supervisor.pid)"
)
_FUNCTION = "def f{n}(x={n}):\n    return x * {n}"
_LAST = "last = {n}\nprint(last)"
_TRAIN = f"%%tpu_train --cores 2\nprint('rank {WORDS} {{n}}', flush=True)"


def measure(folder: Path, rounds: int, cells: int, outputs: int, prelude: int) -> str:
    """Measure all rows with these many cells, bytes of outputs and seconds of a prelude."""
    found = dict[str, Samples]()
    for number in range(rounds):
        place = folder / str(number)
        place.mkdir()
        for load in ("plain", "loaded"):
            found.setdefault(load, Samples()).add([_cells(place / f"{load}.ipynb", load, cells)])
        for what, values in _first_lines(place / "large.ipynb", cells).items():
            found.setdefault(what, Samples()).add(values)
        for what, size in (("small file", 0), ("large file", outputs)):
            took = _with_outputs(place / f"outputs{size}.ipynb", size)
            found.setdefault(what, Samples()).add(took)
        for count in (cells // 4, cells):
            took = [_ahead(place / f"ahead{count}.ipynb", count)]
            found.setdefault(f"ahead {count}", Samples()).add(took)
        first, idle = _waiting(place / "waiting.ipynb", prelude)
        found.setdefault("first", Samples()).add([first])
        found.setdefault("idle", Samples()).add([idle])
    return _report(found, cells, outputs, prelude)


def _sources(cells: int) -> list[str]:
    """Cells of sixteen functions each."""
    return [
        "\n".join(_FUNCTION.format(n=16 * cell + n) for n in range(16)) for cell in range(cells - 1)
    ]


def _write(path: Path, sources: list[str], outputs: int = 0) -> Path:
    cells = [v4.new_code_cell(source, id=f"cell-{at}") for at, source in enumerate(sources)]
    if outputs:
        text = json.dumps({"values": list(range(10_000))})
        shown = v4.new_output("stream", text=text * (outputs // len(text)))
        cells[1].outputs = [shown]
    nbformat.write(v4.new_notebook(cells=cells), path)
    return path


def _cells(path: Path, load: str, cells: int) -> float:
    """The seconds of all cells in a kernel, one after the other."""
    first = "%load_ext tpunb" if load == "loaded" else "pass"
    with Kernel(_write(path, [first, *_sources(cells)])) as kernel:
        kernel.cell(0)
        began = time.monotonic()
        for at in range(1, cells):
            kernel.cell(at)
        return time.monotonic() - began


def _first_lines(path: Path, cells: int) -> dict[str, list[float]]:
    """The seconds to the first line of a rank: nothing edited, the train cell, the last cell."""
    setup = "%load_ext tpunb\n%tpu_setup"
    sources = [setup, *_sources(cells), _LAST.format(n=0), _TRAIN.format(n=0)]
    found: dict[str, list[float]] = {"nothing": [], "train cell": [], "last cell": []}
    with Kernel(_write(path, sources)) as kernel:
        for at in range(len(sources) - 1):
            kernel.cell(at)
        kernel.wait_until_warm()
        last, train = list(kernel.cells)[-2:]

        def first_line(what: str | None) -> None:
            ran = kernel.cell(len(sources) - 1, await_words=[WORDS])
            assert ran.found is not None
            if what is not None:
                found[what].append(ran.found - ran.sent)

        first_line(None)  # the first run of this kernel reads all cells
        for number in range(1, 6):
            first_line("nothing")
            kernel.cells[train] = _TRAIN.format(n=number)
            kernel.save()
            first_line("train cell")
            kernel.cells[last] = _LAST.format(n=number)
            kernel.save()
            kernel.cell(len(sources) - 2)
            first_line("last cell")
    return found


def _with_outputs(path: Path, outputs: int) -> list[float]:
    sources = ["%load_ext tpunb\n%tpu_setup", "pass", _TRAIN.format(n=0)]
    with Kernel(_write(path, sources, outputs)) as kernel:
        for at in range(2):
            kernel.cell(at)
        kernel.wait_until_warm()
        kernel.cell(2)
        found = []
        for _ in range(5):
            ran = kernel.cell(2, await_words=[WORDS])
            assert ran.found is not None
            found.append(ran.found - ran.sent)
        return found


def _ahead(path: Path, cells: int) -> float:
    """The seconds of a cell with `%tpu_setup --ahead`."""
    sources = ["%load_ext tpunb\n%tpu_setup --ahead", *_sources(cells)]
    with Kernel(_write(path, sources)) as kernel:
        kernel.cell(0)
        kernel.wait_until_warm()
        began = time.monotonic()
        for at in range(1, cells):
            kernel.cell(at)
        return (time.monotonic() - began) / (cells - 1)


def _waiting(path: Path, prelude: int) -> tuple[float, float]:
    """Seconds to the first line of a kernel's first run, whose prelude ran ahead; and the part of a
    core that the supervisor of a rank which sleeps uses, in percent.
    """
    sleep = "%%tpu_train --cores 1\nimport time; time.sleep(12)"
    sources = ["%load_ext tpunb\n%tpu_setup --ahead", _PRELUDE.format(seconds=prelude), "pass"]
    with Kernel(_write(path, [*sources, _TRAIN.format(n=0), sleep])) as kernel:
        kernel.cell(0)
        kernel.wait_until_warm()
        supervisor = int(kernel.do(_SUPERVISOR).stdout)
        for at in (1, 2):
            kernel.cell(at)
        until(lambda: any(map(is_kept, processes.descendants(supervisor))), "a kept prelude")
        ran = kernel.cell(3, await_words=[WORDS])
        assert ran.found is not None
        ran_asleep = kernel.start(4)
        time.sleep(3)
        used = _used(supervisor)
        time.sleep(7)
        used = _used(supervisor) - used
        kernel.wait(ran_asleep)
        return ran.found - ran.sent, 100 * used / 7


def _used(pid: int) -> float:
    """Processor seconds of a process's main thread."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def _report(found: dict[str, Samples], cells: int, outputs: int, prelude: int) -> str:
    rows = [(f"a notebook of {cells} cells of 16 functions", "seconds", "goal", "")]
    for what in ("nothing", "train cell", "last cell"):
        took = found[what]
        rows.append((f"first line, edited: {what}", took.text(2), "0.25", met(took, most=0.25)))
    ratio = found["loaded"].over(found["plain"])
    rows.append(("its cells in the kernel, without tpunb", found["plain"].text(2), "", ""))
    rows.append(("… with tpunb loaded", found["loaded"].text(2), "", ""))
    rows.append(("… ratio", ratio.text(2), "1.05 ×", met(ratio, most=1.05)))
    large = found["large file"]
    rows.append(("first line of a small notebook", found["small file"].text(2), "", ""))
    rows.append(
        (f"… with {outputs / 1e6:.0f} MB of outputs", large.text(2), "0.20", met(large, most=0.2))
    )
    few, many = found[f"ahead {cells // 4}"], found[f"ahead {cells}"]
    rows.append((f"a cell with --ahead, of {cells // 4}", few.text(3), "", ""))
    rows.append((f"… of {cells}", many.text(3), "", ""))
    ratio = many.over(few)
    rows.append(("… ratio (4 if it reads all cells)", ratio.text(2), "1.5 ×", met(ratio, most=1.5)))
    first, idle = found["first"], found["idle"]
    label = f"first line of a kernel, --ahead, after a prelude of {prelude} s"
    rows.append((label, first.text(2), "0.3", met(first, most=0.3)))
    rows.append(
        ("% of a core, supervisor of an idle run", idle.text(2), "0.3", met(idle, most=0.3))
    )
    return table(rows)
