"""IPython formatters that display results, diagnoses and snapshots as cards."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

from tpunb.display import html, status
from tpunb.notebook.models import Snapshot
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunState
from tpunb.utils.text import duration, number

if TYPE_CHECKING:
    from tpunb.runs.listing import RunTable
    from tpunb.runs.result import Causes, Diagnosis

_last: tuple[Path, int] | None = None
"""The run whose card was shown last, and the execution count of its cell."""


def register_formatters(shell: InteractiveShell) -> None:
    for kind, function in _HTML.items():
        _formatter(shell).for_type(kind, function)
    _formatter(shell, "text/plain").for_type(_RESULT, _pretty_result)


def unregister_formatters(shell: InteractiveShell) -> None:
    for kind in _HTML:
        _formatter(shell).pop(kind, None)
    _formatter(shell, "text/plain").pop(_RESULT, None)


def _formatter(shell: Any, mime: str = "text/html") -> Any:
    return shell.display_formatter.formatters[mime]


def note_card(folder: Path) -> None:
    """Note that the running cell shows the card of the run in this folder."""
    global _last
    _last = folder, _execution_count()


def _execution_count() -> int:
    shell: Any = get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
    return -1 if shell is None else int(shell.execution_count)


def _is_shown(of: RunResult) -> bool:
    """True if the running cell already shows the card."""
    return _last == (of.dir, _execution_count())


def _result(of: RunResult) -> str | None:
    """Return the card; None in the cell that already shows it, where one line is enough."""
    return None if _is_shown(of) else result_card(of)


def _pretty_result(of: RunResult, printer: Any, cycle: bool) -> None:
    if _is_shown(of):
        printer.text(repr(of))
    else:
        of._repr_pretty_(printer, cycle)


def result_card(of: RunResult) -> str:
    left_out = len(of.summary.curves) - status.MOST_METRICS
    returned = [f"returned: {', '.join(of.returns)}"] if of.returns else []
    return html.Card(
        colour=status.colour_of(of),
        state=status.describe_end(of),
        facts=[of.name, of.cores(), duration(of.duration), *returned],
        aside=str(of.dir),
        metrics=[
            html.CardMetric(
                name, value := number(points[-1][1]), chart=status.chart_of(of, name, value)
            )
            for name, points in list(of.summary.curves.items())[: status.MOST_METRICS]
        ],
        more=f"and {left_out} more" if left_out > 0 else "",
        summary=of.summary.lines(),
        failure=html.FailureDetails.of(of, traceback=True),
        remarks=of.remarks(),
    ).html()


def _diagnosis(of: Diagnosis) -> str:
    """Return a card with a cause, its evidence and the fix."""
    evidence = "\n".join(str(line) for line in of.evidence)
    link = escape(of.link, quote=True)
    return html.framed(
        status.COLOURS[RunState.FAILED],
        [
            f"<div><b>{escape(of.cause)}</b> [{escape(of.id)}]</div>",
            html.preformatted(escape(evidence)) if evidence else "",
            f"<div><b>Fix:</b> {_steps(of)}</div>",
            f'<div><a href="{link}">{link}</a></div>' if link else "",
        ],
    )


def _steps(of: Diagnosis) -> str:
    if len(of.steps) < 2:
        return escape(of.fix)
    items = "".join(f"<li>{escape(step)}</li>" for step in of.steps)
    return f'<ol style="margin:0">{items}</ol>'


def _causes(of: Causes) -> str:
    return "".join(map(_diagnosis, of))


def _snapshot(of: Snapshot) -> str:
    first, *rest = str(of).splitlines()
    lines = [f"<div><b>{escape(first)}</b></div>", *(f"<div>{escape(line)}</div>" for line in rest)]
    return html.framed("#808080", lines)


def _runs(of: RunTable) -> str:
    colours = [status.COLOURS.get(run.state, html.GREY) for run in of.runs]
    table = html.table(of.heads, zip(colours, of.rows, strict=True)) if of.runs else ""
    return table + "".join(f"<div>{escape(note)}</div>" for note in of.notes)


_RESULT = "tpunb.runs.result.RunResult"
_HTML: dict[str, Callable[[Any], str | None]] = {
    _RESULT: _result,
    "tpunb.notebook.models.Snapshot": _snapshot,
    "tpunb.runs.result.Diagnosis": _diagnosis,
    "tpunb.runs.result.Causes": _causes,
    "tpunb.runs.listing.RunTable": _runs,
}
"""Formatters by type name, so that registering them imports none of the types."""
