"""The table of rules: the YAML files in `rules/`, read once.

docs/diagnose.md describes the keys of a rule.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal, get_args

from tpunb.diagnostics.failure.log import compile_pattern
from tpunb.machine import packages
from tpunb.runs.spec import BackendName

Kind = Literal["cause", "symptom"]
_CONFIDENCE = {"cause": 0.9, "symptom": 0.5}
Line = tuple[re.Pattern[str], ...]
"""One or several patterns that must all match the same line."""


@dataclass(frozen=True)
class Sign:
    """One way to recognise a cause: all conditions that are set must hold."""

    confidence: float
    lines: tuple[Line, ...] = ()
    """`any`: a line that may be a reason matches one of these."""
    unless: tuple[re.Pattern[str], ...] = ()
    """`not`: that line matches none of these."""
    context: tuple[Line, ...] = ()
    """`with`: for each of these, some line anywhere in the log matches."""
    exit: frozenset[str] = frozenset()
    """A process ended with one of these: 'SIGKILL', '17'."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Required values of `Facts`."""


@dataclass(frozen=True)
class FailureRule:
    """A cause, the signs by which it is recognised, and the fix."""

    id: str
    kind: Kind
    """A symptom has a cause that other lines may name: it ranks behind every cause."""
    at_start: bool
    """True if this only happens before a run has begun to train."""
    cause: str
    fixes: Mapping[str, tuple[str, ...]]
    """Steps, keyed by 'any', a backend, or a platform: 'colab', 'kaggle', 'gcp'."""
    link: str
    """A page about exactly this error, to show; '' if there is none."""
    signs: tuple[Sign, ...]
    explains: frozenset[str]
    """Rules of the same kind that rank behind this one if both hold."""
    harmless: tuple[str, ...]
    """Similar lines with another meaning, which no sign may match."""
    backends: frozenset[BackendName]
    """The backends whose runs can fail so, and have what the texts advise."""

    def steps(self, platform: str | None, backend: BackendName | None = None) -> tuple[str, ...]:
        """Return the fix for a platform, or else for a backend; None: it is not known."""
        keys = (platform or "", backend or "", "any")
        steps = next(self.fixes[key] for key in keys if key in self.fixes)
        return tuple(_with_commands(step, platform or "") for step in steps)


def _with_commands(step: str, platform: str) -> str:
    """Replace `{pair}` in a step with the command by which `tpunb doctor` installs torch and
    torch_xla on this platform, `{pair without libtpu}` with that for machines without a TPU.
    """
    for mark, tpu in (("{pair}", True), ("{pair without libtpu}", False)):
        if mark in step:
            have = packages.read_installed()
            pair = packages.best_pair(platform)
            command = packages.install_command(pair, platform, tpu=tpu, have=have)
            step = step.replace(mark, f"`{command}`")
    return step


@functools.cache
def rules() -> tuple[FailureRule, ...]:
    folder = resources.files("tpunb.diagnostics.failure") / "rules"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return read_rules({name: (folder / name).read_text(encoding="utf-8") for name in names})


def read_rules(files: Mapping[str, str]) -> tuple[FailureRule, ...]:
    """Read rules from texts, keyed by file name.

    They come with the package; a test checks them against a schema.
    """
    import yaml  # not needed before something has failed

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(_rule(entry) for text in files.values() for entry in yaml.load(text, loader))


def _rule(entry: Mapping[str, Any]) -> FailureRule:
    kind: Kind = entry.get("kind", "cause")
    confidence = float(entry.get("confidence", _CONFIDENCE[kind]))
    return FailureRule(
        entry["id"],
        kind,
        entry.get("at_start", False),
        _plain(entry["cause"]),
        _fixes(entry["fix"]),
        entry["source"] if entry.get("link") else "",
        tuple(_sign(sign, confidence) for sign in entry["signs"]),
        frozenset(_list(entry.get("explains", []))),
        _list(entry.get("harmless", [])),
        frozenset(entry.get("backends", get_args(BackendName))),
    )


def _fixes(entry: Any) -> dict[str, tuple[str, ...]]:
    """A fix: text, a list of steps, or a mapping from platform or backend to either."""
    by_place = entry if isinstance(entry, dict) else {"any": entry}
    return {place: tuple(map(_plain, _list(steps))) for place, steps in by_place.items()}


def _list(entry: Any) -> tuple[Any, ...]:
    return tuple(entry) if isinstance(entry, list) else (entry,)


def _plain(text: str) -> str:
    return " ".join(text.split())


def _sign(entry: Any, confidence: float) -> Sign:
    if not isinstance(entry, dict):
        entry = {"any": [entry]}
    return Sign(
        float(entry.get("confidence", confidence)),
        _lines(entry.get("any", [])),
        tuple(map(compile_pattern, _list(entry.get("not", [])))),
        _lines(entry.get("with", [])),
        frozenset(map(str, entry.get("exit", []))),
        entry.get("facts", {}),
    )


def _lines(entry: Any) -> tuple[Line, ...]:
    """A pattern, or a list whose items are patterns or lists of patterns for the same line."""
    return tuple(tuple(map(compile_pattern, _list(item))) for item in _list(entry))
