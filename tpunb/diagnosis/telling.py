"""The honest answer to an unknown failure: the lines that tell most, without a guess."""

from __future__ import annotations

import re

from tpunb.diagnosis.log import Log

_FRAME = re.compile(r"Traceback \(most recent call last\)")
_EXCEPTION = re.compile(
    r"^\s*(?:[A-Za-z_][\w.]*\.)?(?:[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure)"
    r"|Exception|StopIteration|Empty|Killed)(?::|$|\s*$)"
    r"|^(?:[a-z_]\w*\.)+[A-Z]\w+(?<!Warning): "
)
_FATAL = re.compile(
    r"^F\d{4} |^\S+ \S+: F |\bCheck fail(?:ed|ure)\b|terminate called|what\(\): "
    r"|Segmentation fault|SIGSEGV|SIGABRT|SIGBUS|core dumped|\bFatal\b|\bpanic\b"
    r"|^\*\*\* Aborted|\b[A-Z_]*(?:EXHAUSTED|INTERNAL|UNAVAILABLE|PRECONDITION|UNKNOWN): "
)
_KILLED = re.compile(r"^(?:.*: )?Killed(?:\s+\S+)?$|exit(?:ed)? (?:with )?(?:code|status) [1-9]")
_LONGEST = 400
"""Characters of a line that are looked at."""
_SCANNED = 20_000
"""Lines from the end of a log that are looked at: the end is where it failed."""


def telling_lines(text: str, most: int = 8) -> list[str]:
    """The lines of a log of a failed run that say most about its end, in their order.

    First the exceptions that ended tracebacks and the fatal lines of native code, then lines
    that speak of an error, and where there is none of these, the last lines.
    """
    log = Log(text)
    start = max(0, len(log.lines) - _SCANNED)
    weights: dict[str, tuple[int, int]] = {}
    for number in range(start, len(log.lines)):
        line = log.body(number)[:_LONGEST].rstrip()
        weight = _weight(line)
        if weight and line.strip() not in weights:
            weights[line.strip()] = (weight, number)
    # The best; of equally good ones the first, which is nearer to the cause.
    best = sorted(weights.items(), key=lambda item: (-item[1][0], item[1][1]))[:most]
    if best:
        return [_cut(line) for line, _ in sorted(best, key=lambda item: item[1][1])]
    last = [line.strip() for line in log.lines[start:] if line.strip()]
    return [_cut(line) for line in last[-most:]]


def _weight(line: str) -> int:
    if _EXCEPTION.search(line):
        return 3
    if _FATAL.search(line):
        return 3
    if _KILLED.search(line):
        return 2
    lowered = line.lower()
    return 1 if "error" in lowered or "failed" in lowered else 0


def _cut(line: str, most: int = 300) -> str:
    return line if len(line) <= most else line[: most - 2] + " …"
