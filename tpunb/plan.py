"""What would run, in words: the plan that `--dry-run` shows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from tpunb import processors
from tpunb.models import Device, Script, Snapshot
from tpunb.platforms.environment import Change
from tpunb.platforms.one_process import OneProcess
from tpunb.reading import Reading


def describe(
    read: Reading,
    cores: int,
    device: Device,
    changes: Sequence[Change],
    one: OneProcess | None = None,
) -> str:
    """The plan of a run: where the cells come from, what is left out, where it runs, what lint
    has found, the script. `one`: how one process drives all cores, if one does.
    """
    snapshot, script, replicate = read.snapshot, read.script, read.replicate
    kind = "rehearsal cores on CPU" if device == "CPU" else "TPU cores"
    lines = [
        f"notebook: {snapshot.path or 'no file'} (from {snapshot.origin})",
        *snapshot.notes,
        f"prelude: {_cells(script, 'prelude')}; train cell: {_cells(script, 'train')}",
        f"{cores} {kind}; {_how(one, replicate)}",
    ]  # fmt: skip
    if one is not None:
        changes = one.changes
    if left_out := [*_cells_left_out(snapshot), *_pieces_left_out(script)]:
        lines += ["left out:", *left_out]
    if changes:
        lines.append("environment of the ranks, beside the kernel's:")
        for change in changes:
            what = "removed" if change.value is None else f"= {change.value}"
            lines.append(f"  {change.name} {what}  ({change.reason})")
    lines += _processors()
    if read.findings:
        lines.append("lint:")
        lines += [f"  {line}" for found in read.findings for line in str(found).split("\n")]
    return "\n".join([*lines, "", script.text.rstrip()])


def _processors() -> Iterator[str]:
    """That the ranks get more processors than this thread of the kernel has, if so."""
    given, left = processors.allowed(), os.sched_getaffinity(0)
    if left != given:
        yield (
            f"processors: the {len(given)} that the kernel was started with; its main thread is "
            f"pinned to {len(left)}, as OpenMP does where OMP_PROC_BIND or the like is set"
        )


def _how(one: OneProcess | None, replicate: str | None) -> str:
    if one is not None:
        return f"SPMD: one process drives them all ({one.why})"
    if replicate:
        return f"every rank runs the prelude: {replicate}"
    return "the prelude runs once, then the ranks are forked"


def _cells_left_out(snapshot: Snapshot) -> Iterator[str]:
    """Whole cells that are not part of the notebook that is run, with their first lines."""
    for cell, reason in snapshot.left_out:
        if cell.source.strip():
            yield f"  {snapshot.called(cell)}: {cell.source.strip().splitlines()[0]}  ({reason})"


def _pieces_left_out(script: Script) -> Iterator[str]:
    """What the conversion leaves out, with cell and line."""
    for omission in script.omissions:
        where = "" if omission.cell is None else f"cell [{omission.cell}], line {omission.line}: "
        text = omission.text.strip().splitlines()[0] if omission.text.strip() else ""
        yield f"  {where}{text}  ({omission.reason})"


def _cells(script: Script, role: str) -> str:
    numbers = [f"[{block.number}]" for block in script.blocks if block.role == role]
    return " ".join(numbers) or "none"
