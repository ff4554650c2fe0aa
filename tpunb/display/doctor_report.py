"""The report of `%tpu_setup` and `tpunb doctor`, as text and as a card.

Like a run's card, it uses only inline styles that every front end keeps, and no text colours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from tpunb.machine.doctor import SetupReport
from tpunb.machine.problem import SetupProblem
from tpunb.runs.spec import count_cores
from tpunb.utils.terminal import PaintedText, Style, join, paint
from tpunb.utils.text import memory_size

_GOOD, _BAD = "#2da44e", "#e5534b"
_FAINT = "opacity:0.7"
_COMMAND = re.compile("`([^`]+)`")


def report_text(report: SetupReport, own: Sequence[tuple[str, str]] = ()) -> str:
    """Return the report as text. `own`: additional rows, about the kernel that shows it."""
    rows = [*_rows(report), *own]
    wide = max(len(name) for name, _ in rows)
    style = Style.BAD if report.problems else Style.GOOD
    lines: list[str] = [paint(_headline(report), style)]
    if report.problems:
        first, *rest = report.problems
        lines += [f"  {first.message}", _fix(first), ""]
        lines += [line for other in rest for line in _labelled("also:", other)]
        lines += [""] if rest else []
    lines += [
        paint(f"{name.ljust(wide)}  {value}", Style.FAINT, end=len(name)) for name, value in rows
    ]
    lines += [line for note in report.advice for line in _labelled("note:", note)]
    return join("\n", lines)


def report_card(report: SetupReport, own: Sequence[tuple[str, str]] = ()) -> str:
    """Return the report as HTML."""
    colour = _BAD if report.problems else _GOOD
    parts = [f"<div><b>{escape(_headline(report))}</b></div>"]
    if report.problems:
        first, *rest = report.problems
        parts.append(_problem(first))
        parts += [_problem(other, "also: ") for other in rest]
    # Not a table: front ends give tables their own stripes, borders and colours.
    label = f"{_FAINT};flex:0 0 7em"
    rows = "".join(
        f'<div style="display:flex"><span style="{label}">{escape(name)}</span> '
        f'<span style="min-width:0;word-break:break-word">{escape(value)}</span></div>'
        for name, value in [*_rows(report), *own]
    )
    parts.append(f'<div style="margin:4px 0 0 0">{rows}</div>')
    parts += [_problem(note, "note: ", faint=True) for note in report.advice]
    return (
        f'<div style="border-left:3px solid {colour};padding:2px 0 2px 8px;margin:2px 0;'
        f'max-width:860px">{"".join(parts)}</div>'
    )


def _fix(problem: SetupProblem) -> PaintedText:
    return paint(f"  → {problem.fix}", Style.STRONG, end=len("  → "))


def _labelled(label: str, problem: SetupProblem) -> list[str]:
    message = paint(f"{label} {problem.message}", Style.STRONG, end=len(label))
    return [message, _fix(problem)]


def _problem(problem: SetupProblem, before: str = "", *, faint: bool = False) -> str:
    style = f"margin:4px 0 0 0;{_FAINT}" if faint else "margin:4px 0 0 0"
    fix = _COMMAND.sub(r"<code>\1</code>", escape(problem.fix))
    return f'<div style="{style}">{escape(before + problem.message)}<br>→ {fix}</div>'


def _headline(report: SetupReport) -> str:
    if report.problems:
        count = len(report.problems)
        return "1 issue found:" if count == 1 else f"{count} issues found, the first:"
    return f"Ready: {_cores(report)}"


def _cores(report: SetupReport) -> str:
    machine, cores = report.machine, report.cores
    many = f"{cores} core{'s' if cores != 1 else ''}"
    if machine.device == "CPU":
        return f"{count_cores(cores, machine.device)} on {machine.processors} processors"
    if machine.device == "GPU":
        few = f" of {machine.gpus}" if cores < machine.gpus else ""
        return f"{count_cores(cores, machine.device)}{few}"
    chips = f"chip{'s' if machine.chips != 1 else ''}"
    return f"{many} on {machine.chips} TPU {machine.generation} {chips}"


def _rows(report: SetupReport) -> list[tuple[str, str]]:
    machine, room = report.machine, report.room
    names = " · ".join(
        f"{name} {version}" for name, version in report.packages.main_versions().items()
    )
    disk = f"{memory_size(room.disk)} free in {room.runs}"
    if room.shm is not None:
        disk += f" · /dev/shm {memory_size(room.shm)}"
    backend = f"{machine.backend} (because {report.why})" if report.why else machine.backend
    rows = [("platform", machine.kind), ("backend", backend)]
    rows += [("device", _device(report)), ("versions", names)]
    if len(machine.rank_counts) > 1:
        rows.append(("cores", f"{machine.name_rank_counts()} on this host"))
    rows += [("memory", f"{memory_size(machine.memory)} free"), ("disk", disk)]
    if report.price is not None:
        rows.append(("price", str(report.price)))
    return rows


def _device(report: SetupReport) -> str:
    machine = report.machine
    if machine.device == "GPU":
        return " · ".join([_cores(report), *map(str, report.gpus)])
    if not machine.chips and machine.device == "TPU":
        return "no TPU, although PJRT_DEVICE=TPU is set: nothing can run"
    if not machine.chips:
        return f"no TPU; {_cores(report)}"
    parts = [machine.accelerator_type or f"TPU {machine.generation}"]
    parts.append(f"{machine.chips} chip{'s' if machine.chips != 1 else ''} on this host")
    if machine.made is not None:
        parts.append(f"{machine.made.hbm} GiB HBM a chip")
    if machine.workers > 1:
        parts.append(f"host {machine.worker} of {machine.workers}")
    if machine.spot is not None:
        parts.append("spot: may be preempted" if machine.spot else "not spot")
    if machine.device == "CPU":
        why = "PJRT_DEVICE=CPU" if machine.backend == "xla" else f"backend {machine.backend}"
        parts.append(f"not used ({why}): {_cores(report)}")
    return " · ".join(parts)
