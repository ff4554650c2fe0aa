"""What `%tpu_setup` and `tpunb doctor` show: a card, and the same as text.

As the status of a run: inline styles of those that every front end keeps, the text's own colour.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from tpunb.display.status import span
from tpunb.platforms.problem import Problem
from tpunb.platforms.report import Report
from tpunb.platforms.resources import size

_GOOD, _BAD = "#2da44e", "#e5534b"
_FAINT = "opacity:0.7"
_COMMAND = re.compile("`([^`]+)`")


def text(report: Report, own: Sequence[tuple[str, str]] = ()) -> str:
    """The card as text. `own`: rows of the kernel that shows it."""
    rows = [*_rows(report), *own]
    wide = max(len(name) for name, _ in rows)
    lines = [_headline(report)]
    if report.problems:
        first, *rest = report.problems
        lines += [f"  {first.message}", f"  → {first.fix}", ""]
        lines += [line for one in rest for line in ("also: " + one.message, f"  → {one.fix}")]
        lines += [""] if rest else []
    lines += [f"{name.ljust(wide)}  {value}" for name, value in rows]
    lines += [line for one in report.advice for line in (f"note: {one.message}", f"  → {one.fix}")]
    return "\n".join(lines)


def card(report: Report, own: Sequence[tuple[str, str]] = ()) -> str:
    """The card as HTML."""
    colour = _BAD if report.problems else _GOOD
    parts = [f"<div><b>{html.escape(_headline(report))}</b></div>"]
    if report.problems:
        first, *rest = report.problems
        parts.append(_told(first))
        parts += [_told(one, "also: ") for one in rest]
    # Not a table: front ends give tables stripes, borders and a colour of their own.
    label = f"{_FAINT};display:inline-block;min-width:7em"
    rows = "".join(
        f'<div><span style="{label}">{html.escape(name)}</span> {html.escape(value)}</div>'
        for name, value in [*_rows(report), *own]
    )
    parts.append(f'<div style="margin:4px 0 0 0">{rows}</div>')
    parts += [_told(one, "note: ", faint=True) for one in report.advice]
    return (
        f'<div style="border-left:3px solid {colour};padding:2px 0 2px 8px;margin:2px 0;'
        f'max-width:860px">{"".join(parts)}</div>'
    )


def _told(problem: Problem, before: str = "", *, faint: bool = False) -> str:
    style = f"margin:4px 0 0 0;{_FAINT}" if faint else "margin:4px 0 0 0"
    fix = _COMMAND.sub(r"<code>\1</code>", html.escape(problem.fix))
    return f'<div style="{style}">{html.escape(before + problem.message)}<br>→ {fix}</div>'


def _headline(report: Report) -> str:
    if report.problems:
        count = len(report.problems)
        return "First mend this:" if count == 1 else f"{count} things to mend. First this:"
    return f"Ready: {_cores(report)}"


def _cores(report: Report) -> str:
    here, cores = report.machine, report.cores
    many = f"{cores} core{'s' if cores != 1 else ''}"
    if here.device == "CPU":
        return many.replace(" core", " rehearsal core") + f" on {here.processors} processors"
    return f"{many} on {here.chips} TPU {here.generation} chip{'s' if here.chips != 1 else ''}"


def _rows(report: Report) -> list[tuple[str, str]]:
    here, room = report.machine, report.room
    names = " · ".join(f"{name} {version}" for name, version in report.packages.shown().items())
    ranks = "1 rank needs" if report.cores == 1 else f"{report.cores} ranks need"
    memory = f"{size(room.memory)} free; {ranks} about {size(room.needed)}"
    disk = f"{size(room.disk)} free in {room.runs}"
    if room.shm is not None:
        disk += f" · /dev/shm {size(room.shm)}"
    rows = [("platform", here.kind), ("device", _device(report)), ("versions", names)]
    rows += [("memory", memory), ("disk", disk)]
    if room.cache:
        rows.append(("compiled", f"kept in {room.cache} ({size(room.cached)})"))
    if report.credentials:
        found = ", ".join(f"{one.service} ({one.place})" for one in report.credentials)
        rows.append(("credentials", found))
    if report.price is not None:
        rows.append(("price", str(report.price)))
    if report.quota is not None:
        rows.append(("quota left", str(report.quota)))
    if room.left is not None:
        rows.append(("time left", f"at most {span(room.left)}"))
    return rows


def _device(report: Report) -> str:
    here = report.machine
    if not here.chips:
        return f"no TPU; {_cores(report)}"
    parts = [here.accelerator_type or f"TPU {here.generation}"]
    parts.append(f"{here.chips} chip{'s' if here.chips != 1 else ''} on this host")
    if here.made is not None:
        parts.append(f"{here.made.hbm} GiB HBM a chip")
    if here.workers > 1:
        parts.append(f"host {here.worker} of {here.workers}")
    if here.spot is not None:
        parts.append("spot: may be taken away" if here.spot else "not spot")
    if here.device == "CPU":
        parts.append(f"not used (PJRT_DEVICE=CPU): {_cores(report)}")
    return " · ".join(parts)
