"""Derive fields that the files of older runs lack from the texts that these runs wrote.

`spec.json` of such a run has no "version". No other module derives meaning from texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpunb.runs.spec import FailureKind, PhaseKind, Stop, StopCause, StopOrigin

_PHASES = {
    "waits for ": PhaseKind.QUEUED,
    "starting": PhaseKind.STARTING,
    "prelude": PhaseKind.PRELUDE,
    "training": PhaseKind.TRAINING,
    "no sign of life": PhaseKind.COLLECTING_STACKS,
}
_STOPS = {
    "interrupted in the notebook": Stop(StopCause.USER, origin=StopOrigin.NOTEBOOK),
    "stopped with tpunb stop": Stop(StopCause.USER, origin=StopOrigin.COMMAND),
    "stopped with %tpu_stop": Stop(StopCause.USER, origin=StopOrigin.MAGIC),
    "stopped with .stop()": Stop(StopCause.USER, origin=StopOrigin.HANDLE),
    "--timeout ": Stop(StopCause.TIMEOUT),
    "no rank has shown a sign of life": Stop(StopCause.HUNG),
    "the kernel has ended": Stop(StopCause.KERNEL_GONE),
    "the guard was told to end": Stop(StopCause.KERNEL_GONE),
    "this machine is about to be taken away": Stop(StopCause.PREEMPTED),
    "rank ": Stop(StopCause.PEER_FAILED),
    "a rank has failed": Stop(StopCause.PEER_FAILED),
}
_FAILURES = {
    "Signal": FailureKind.SIGNAL,
    "Exit": FailureKind.EXIT,
    "Hang": FailureKind.HANG,
    "Lost": FailureKind.LOST,
    "PeerLostError": FailureKind.PEER_LOST,
    "WaitedTooLongError": FailureKind.PEER_LOST,
    "CollectiveError": FailureKind.PEER_LOST,
}


def upgrade_event(data: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a line of `events.jsonl` to the current form."""
    values = dict(data)
    values["event"] = values.pop("kind", None)
    if values["event"] == "Phase":
        text = str(values.get("text"))
        kinds = (kind for start, kind in _PHASES.items() if text.startswith(start))
        values["kind"] = next(kinds, PhaseKind.ENDED)
    elif values["event"] == "Stopping":
        values["stop"] = upgrade_stop(str(values.get("reason")))
    return values


def upgrade_stop(reason: str) -> dict[str, Any] | None:
    """Return `stop` of `result.json` for a `reason` text; None for an unknown or empty text."""
    # Older run folders have only this text.
    stops = (stop for start, stop in _STOPS.items() if reason.startswith(start))
    known = next(stops, None)
    return None if known is None else {"cause": known.cause, "origin": known.origin}


def failure_kind(type: str, message: str) -> FailureKind:
    """Return `kind` for an entry of `failures` in `result.json`."""
    # The text "most often because memory ran out" does not count: it was a guess.
    if type == "Signal" and message.startswith("was killed because memory ran out ("):
        return FailureKind.OUT_OF_MEMORY
    return _FAILURES.get(type, FailureKind.EXCEPTION)
