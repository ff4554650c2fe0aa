"""A rule's texts for one failure: the library that makes the call, the name that was meant."""

from __future__ import annotations

from tpunb.diagnostics.failure.api_names import explain_name
from tpunb.diagnostics.failure.evidence import LoggedException
from tpunb.diagnostics.failure.facts import Facts
from tpunb.diagnostics.failure.log import Log
from tpunb.diagnostics.failure.origin import Origin, native_library, to_search_for, version_of
from tpunb.diagnostics.failure.rules import FailureRule, named_in
from tpunb.runs.result import Diagnosis, Evidence

UNEXPLAINED = "unexplained"
"""The id of the answer if no rule matches: it says what is known, and names no cause."""
_OTHER = "the library that the message is about"
"""For `{other}` in a fix, if the message does not name it."""
_OWN = "the packages that it needs"
"""For `{other}`, if it is the library that makes the call."""


def texts(
    rule: FailureRule, error: LoggedException | None, log: Log, facts: Facts
) -> tuple[str, tuple[str, ...]]:
    """Return the cause and the steps of the fix for a rule; `error`: in which it matched."""
    message = log.body(error.line) if error is not None else ""
    other = named_in(message, rule.signs).get("other", _OTHER)
    cause = rule.cause
    steps = tuple(step.replace("{other}", other) for step in rule.steps(facts.platform))
    named = explain_name(message)
    if named is not None:
        cause, steps = named[0], (named[1],)
    origin = Origin.of(log, error) if error is not None else None
    library = origin.caller.library if origin is not None else None
    if origin is None or library is None or not rule.library:
        return cause, steps
    version = version_of(library, log, here=facts.here)
    full = f"{library} {version}" if version else library
    cause = f"{cause} {full} makes the call ({origin.caller}), not your code."
    mended = rule.mended.get(library)
    fix = f"Upgrade {library} to {mended} or later." if mended else rule.library
    other = _OWN if other == library else other
    return cause, (fix.replace("{library}", library).replace("{other}", other),)


def what_is_known(log: Log, errors: list[LoggedException], facts: Facts) -> Diagnosis | None:
    """Say which library raised an error that no rule matches; None if no library did.

    For an error that the user's own code raised, the traceback shows all there is to know.
    """
    raised = [one for one in errors if not one.of_another_process]
    error = max(raised, key=lambda one: one.line > one.start, default=None)
    if error is None:
        return None
    message = log.body(error.line).strip()
    origin = Origin.of(log, error)
    library = (origin.raised.library if origin is not None else None) or native_library(message)
    if library is None:
        return None
    version = version_of(library, log, here=facts.here)
    full = f"{library} {version}" if version else library
    at, user = "", ""
    if origin is not None and origin.raised.library == library:
        at = f" ({origin.raised})"
    if origin is not None and origin.user is not None:
        user = f", called from {origin.user}"
    return Diagnosis(
        UNEXPLAINED,
        f"No known cause. {full} raised the error{at}{user}.",
        f'Search the issues of {library} for "{to_search_for(message)}".',
        (Evidence(message[:400], () if error.rank is None else (error.rank,)),),
        0.0,
        "",
    )
