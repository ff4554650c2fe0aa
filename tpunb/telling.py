"""How a run ended, and what was captured of a notebook, in words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tpunb import communication, terminal

if TYPE_CHECKING:
    from rich.text import Text

    from tpunb.models import Failure, RunResult, Snapshot


class Told(ABC):
    """Shows itself as it tells of itself: to `print`, to a terminal, and to rich."""

    @abstractmethod
    def told(self) -> str:
        """Itself in words; the first line says the most."""

    def __repr__(self) -> str:
        return self.told()

    def __str__(self) -> str:
        return self.told()

    def __rich__(self) -> Text:
        return terminal.styled(self.told())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """IPython's way to show a value."""
        printer.text(terminal.coloured(self.told()))


def snapshot(of: Snapshot) -> str:
    """What was captured, in a few lines."""
    code = sum(cell.kind == "code" for cell in of.cells)
    where = f" ({of.path})" if of.path else ""
    lines = [f"Snapshot of {of.name}{where}, from {of.origin}: {code} code cells"]
    if of.train is not None:
        lines.append(f"the train cell is {of.called(of.cells[of.train])}")
    lines += [f"left out: {of.called(cell)}, {why}" for cell, why in of.left_out]
    return "\n".join([*lines, *of.notes])


def explain(result: RunResult, *, traceback: bool = True) -> str:
    """The end of the run in words: what, where, why, what to do, and the log's path.

    The first failure's `traceback` comes last.
    """
    lines = []
    failure = result.failure
    if result.state == "succeeded":
        lines.append(f"succeeded on {result.cores()} after {result.duration:.1f} s")
    elif failure is not None and result.state == "hung":
        lines += [failure.message, "stacks of all ranks: " + str(result.dir / "attempts")]
    elif failure is not None and result.state == "failed":
        lines.append(failure.headline())
        if failure.source:
            lines += ["", *numbered(failure.source, failure.line), ""]
        lines += _others(result, failure)
    else:
        words = {"timed_out": "stopped at the time-out", "interrupted": "stopped"}
        reason = f" ({result.reason})" if result.reason else ""
        lines.append(
            f"{words.get(result.state, result.state)}{reason} after {result.duration:.1f} s; "
            f"all {result.world_size} ranks have ended"
        )
    lines += [f"{name} did not come back: {why}" for name, why in result.returns_failed.items()]
    if result.diagnoses:
        lines += [str(result.diagnoses[0]), ""]
    if result.state == "failed" and failure is not None and failure.traceback:
        if traceback:
            lines += [*([""] if lines[-1] else []), failure.traceback.rstrip(), ""]
        else:
            lines.append(
                "traceback: print(tpunb.last_run.explain()), or unfold it in a notebook's card"
            )
    if result.state != "succeeded" and any(result.dir.glob("checkpoints/*.pt")):
        lines.append(f"to go on from its last checkpoint: %%tpu_train --resume {result.dir.name}")
    elif result.state == "interrupted" and result.reason.startswith("this machine"):
        lines.append(
            "run it again on another machine; with tpunb.save(state, step) in the train cell "
            "a run goes on from where it was"
        )
    lines += result.summary.lines()
    if result.price is not None:
        lines.append(result.price.tell(result.duration))
    lines.append(f"log: {result.dir / 'run.log'}")
    return "\n".join(lines)


def numbered(source: Sequence[tuple[int, str]], line: int | None) -> list[str]:
    """Lines of a cell with their numbers, and a mark at the one that matters."""
    return [f"{'❯' if number == line else ' '} {number:>4}  {text}" for number, text in source]


def _others(result: RunResult, first: Failure) -> list[str]:
    """What else failed, in a line or two: ranks that failed alike, and how the next did."""
    rest = [failure for failure in result.failures[1:] if failure.rank is not None]
    alike = [failure for failure in rest if failure.is_like(first)]
    lines = []
    if alike:
        ranks = ", ".join(str(f.rank) for f in sorted(alike, key=lambda f: f.rank or 0))
        lines.append(f"the same in rank{'s' if len(alike) > 1 else ''} {ranks}")
    others = [failure for failure in rest if failure not in alike]
    if others:
        lines.append(f"then: {others[0].headline()}")
    if len(others) > 1:
        lines.append(f"then: {len(others) - 1} more")
    return lines


def text(result: RunResult) -> str:
    """The result as text, as a person reads it at the end of a cell."""
    if result.state != "succeeded":
        return f"RunResult {explain(result, traceback=False)}"
    back = f" · back in the kernel: {', '.join(result.returns)}" if result.returns else ""
    missing = "".join(f"\n{name}: {why}" for name, why in result.returns_failed.items())
    where = " · rehearsal on CPU" if result.device == "CPU" else ""
    told = "".join(f"\n{line}" for line in result.summary.lines())
    told += f"\n{communication.in_words(result.collectives)}" if result.collectives else ""
    told += f"\n{result.price.tell(result.duration)}" if result.price is not None else ""
    return (
        f"RunResult succeeded on {result.cores()} after {result.duration:.1f} s{back}"
        f"{where} · {result.dir}{missing}{told}"
    )
