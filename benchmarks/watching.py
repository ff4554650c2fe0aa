"""The kernel's cost of showing a run, and whether the card is updated in time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import nbformat
from nbformat import v4

from benchmarks.server import Heard, Server
from benchmarks.table import Samples, met, table

RANKS = 8
LINES = 1_000
"""Lines a second of each rank."""
MANY = 256
"""Number of simulated ranks."""
LINE = re.compile(r"^\[\d+\] rank (\d) line (\d{7}):", re.M)
SETUP = f"%load_ext tpunb\n%tpu_setup --cores {RANKS}\nimport json, os, time"
TRAIN = """%%tpu_train
import tpunb
rank, began, number, steps = int(os.environ["RANK"]), time.monotonic(), 0, 0
while (now := time.monotonic() - began) < {seconds}:
    for number in range(number, int(now * {lines})):
        print(f"rank {{rank}} line {{number:07d}}: loss 0.123456, rate 0.001000")
    number = int(now * {lines})
    if (step := int(10 * now)) > steps:
        tpunb.log(step=step, loss=1 / (1 + now))
        steps = step
    time.sleep(0.01)
print("rank", rank, "wrote", number, "lines")"""
SIMULATED = """\
import subprocess, sys, tempfile
from pathlib import Path
from tpunb.display.run_view import RunView
from tpunb.runs.follow import follow_run
from tpunb.runs.spec import RunSpec
from tpunb.runs.directory import RunDir
folder = RunDir(tempfile.mkdtemp(dir="."))
spec = RunSpec(folder.id, "many", {ranks}, "CPU", "/", (), ())
view = RunView(spec, folder, logs=frozenset(range({ranks})))
words = [sys.executable, "-m", "benchmarks.simulated", str(folder.path)]
player = subprocess.Popen([*words, "{ranks}", "5", "{seconds}"], cwd={root!r})
for event in follow_run(folder, spec, lambda: player.poll() is not None):
    if event is None:
        view.tick()
    else:
        view.show(event)
assert player.wait() == 0"""


@dataclass
class Seen:
    """Measurements of one case, over all rounds."""

    share: Samples = field(default_factory=Samples)
    """Processor time, in percent of one core."""
    rate: Samples = field(default_factory=Samples)
    """Updates of the card a second."""
    longest: Samples = field(default_factory=Samples)
    """The longest time between two updates of the card, in seconds."""
    size: Samples = field(default_factory=Samples)
    """Size of the largest card's HTML, in kB."""
    missing: int = 0
    """Lines that are missing from run.log."""
    dropped: int = 0
    """Number of warnings of the server that it drops messages."""

    def add(self, heard: Heard, settle: float) -> None:
        """Add the cards of training ranks, from `settle` seconds after the first one.

        Until then the kernel imports the writer of TensorBoard's files, once.
        """
        cards = [
            (time, used, data["text/html"])
            for time, used, data in heard.updates
            if data["text/plain"].startswith("training · ")
        ]
        cards = [one for one in cards if one[0] >= cards[0][0] + settle]
        (began, before, _), (ended, after, _) = cards[0], cards[-1]
        self.share.add([100 * (after - before) / (ended - began)])
        self.rate.add([(len(cards) - 1) / (ended - began)])
        self.longest.add([max(later[0] - sooner[0] for sooner, later in pairwise(cards))])
        self.size.add([max(len(html.encode()) for _, _, html in cards) / 1000])
        self.dropped += len(heard.dropped)


def measure(folder: Path, rounds: int, seconds: float) -> str:
    """Measure real ranks that print many lines and many simulated ones, `rounds` times."""
    real, many = Seen(), Seen()
    for number in range(rounds):
        where = folder / str(number)
        where.mkdir()
        notebook = where / "watching.ipynb"
        _write(
            notebook,
            [
                SETUP,
                TRAIN.format(seconds=seconds, lines=LINES),
                SIMULATED.format(ranks=MANY, seconds=seconds, root=str(Path(__file__).parents[1])),
            ],
        )
        with Server(notebook) as server:
            server.run(0)
            real.add(server.run(1), seconds / 4)
            real.missing += _missing(where)
            many.add(server.run(2), seconds / 4)
    rows = [("", "kernel, % of a core", "cards/s", "longest wait, s", "card, kB")]
    for label, seen in (
        (f"{RANKS} ranks, {LINES:,} lines/s each", real),
        (f"{MANY} simulated ranks", many),
    ):
        rows.append(
            (label, seen.share.text(1), seen.rate.text(2), seen.longest.text(2), seen.size.text(1))
        )
    goals = [
        ("goal", "measured", ""),
        (
            f"{RANKS} ranks: under 5 % of one core",
            f"{real.share.median():.1f} %",
            met(real.share, most=5),
        ),
        (f"{RANKS} ranks: run.log is complete", f"{real.missing} missing", _none(real.missing)),
        (f"{RANKS} ranks: the server drops nothing", f"{real.dropped} times", _none(real.dropped)),
        (
            f"{MANY} ranks: two updates a second",
            f"{many.rate.median():.2f}",
            met(many.rate, least=1.9),
        ),
        (
            f"{MANY} ranks: a card of at most 10 kB",
            f"{many.size.median():.1f} kB",
            met(many.size, most=10),
        ),
    ]
    head = (
        f"Watching: {seconds:.0f} s each, behind a real Jupyter server. Processor time is that of "
        "the kernel's\nown process while the ranks train, without the first quarter of that time."
    )
    return f"{head}\n\n{table(rows)}\n\n{table(goals)}"


def _none(count: int) -> str:
    return "missed" if count else "met"


def _missing(folder: Path) -> int:
    """The number of lines that ranks report as written and that are not in run.log."""
    [log] = (folder / "runs").glob("*/run.log")
    text = log.read_text()
    written = sum(int(count) for count in re.findall(r"wrote (\d+) lines", text))
    assert len(re.findall(r"wrote \d+ lines", text)) == RANKS
    return written - len(set(LINE.findall(text)))


def _write(path: Path, sources: Sequence[str]) -> None:
    cells = [v4.new_code_cell(source) for source in sources]
    nbformat.write(v4.new_notebook(cells=cells), path)
