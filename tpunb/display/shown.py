"""How results, diagnoses and snapshots show themselves in a notebook: as the cards of runs do.

As text they tell themselves (`telling.Told`), to a terminal and to rich alike.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

from tpunb import accounts, records
from tpunb.display import card, status
from tpunb.display.curve import Curve
from tpunb.models import RunResult, Snapshot

if TYPE_CHECKING:
    from tpunb.diagnosis.finding import Causes, Diagnosis

_last: tuple[Path, int] | None = None
"""The run whose card stands in a cell, and the number of the cell."""


def register(shell: InteractiveShell) -> None:
    """Have the notebook show them so from now on."""
    for kind, function in _HTML.items():
        _formatter(shell).for_type(kind, function)


def unregister(shell: InteractiveShell) -> None:
    """Take `register` back."""
    for kind in _HTML:
        _formatter(shell).pop(kind, None)


def _formatter(shell: Any) -> Any:
    return shell.display_formatter.formatters["text/html"]


def stands_here(folder: Path) -> None:
    """The card of this run is shown in the cell that runs now."""
    global _last
    _last = folder, _cell()


def _cell() -> int:
    shell: Any = get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
    return -1 if shell is None else int(shell.execution_count)


def result(of: RunResult) -> str | None:
    """The card of a run that has ended; None below that card itself, where text is enough."""
    return None if _last == (of.dir, _cell()) else card_of(of)


def card_of(of: RunResult) -> str:
    """The card of a run that has ended."""
    path = of.dir / "metrics.jsonl"
    small = path.exists() and path.stat().st_size <= accounts.READ
    curves: dict[str, Curve] = {}
    newest: dict[str, float] = {}
    for row in records.of_all_ranks(records.read(path)) if small else []:
        for name, value in records.metrics_of(row).items():
            curves.setdefault(name, Curve()).add(value)
            newest[name] = value
    names = list(curves)[: status.MOST_METRICS]
    back = [f"back in the kernel: {', '.join(of.returns)}"] if of.returns else []
    return card.Card(
        colour=status.COLOURS[of.state],
        state=status.ended(of),
        facts=[of.name, of.cores(), status.span(of.duration), *back],
        aside=str(of.dir),
        metrics=[card.Metric(name, f"{newest[name]:.4g}", curves[name]) for name in names],
        more=f"and {len(curves) - len(names)} more" if len(curves) > len(names) else "",
        summary=of.summary.lines(),
        why=card.why(of, folds=True),
    ).html()


def diagnosis(of: Diagnosis) -> str:
    """A cause, what speaks for it, and what to do."""
    evidence = "\n".join(str(line) for line in of.evidence)
    link = escape(of.link, quote=True)
    return card.box(
        status.COLOURS["failed"],
        [
            f"<div><b>{escape(of.cause)}</b> [{escape(of.id)}]</div>",
            card.pre(escape(evidence)) if evidence else "",
            f"<div><b>Fix:</b> {escape(of.fix)}</div>",
            f'<div><a href="{link}">{link}</a></div>',
        ],
    )


def causes(of: Causes) -> str:
    """All of them, the likeliest first."""
    return "".join(map(diagnosis, of))


def snapshot(of: Snapshot) -> str:
    """What was captured of a notebook."""
    first, *rest = of.told().splitlines()
    lines = [f"<div><b>{escape(first)}</b></div>", *(f"<div>{escape(line)}</div>" for line in rest)]
    return card.box("#808080", lines)


_HTML: dict[str, Callable[[Any], str | None]] = {
    "tpunb.models.RunResult": result,
    "tpunb.models.Snapshot": snapshot,
    "tpunb.diagnosis.finding.Diagnosis": diagnosis,
    "tpunb.diagnosis.finding.Causes": causes,
}
"""By the types' names, so that nothing is imported before there is one."""
