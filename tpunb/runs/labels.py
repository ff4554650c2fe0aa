"""Tell runs apart: what differs between them. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tpunb.utils.text import excerpt

MOST = 4
"""The most parameters that a label names."""
LONGEST = 60
"""The most characters of a label before the time."""


def differing(given: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of parameters that differ between runs; a run may lack some."""
    names = dict.fromkeys(name for values in given for name in values)
    return [name for name in names if len({repr(values.get(name)) for values in given}) > 1]


def label_runs(runs: Sequence[tuple[str, Mapping[str, Any], str]]) -> list[str]:
    """Return a unique label for each run, of what differs: 'lr=0.1', 'pretrain, lr=0.1'.

    `runs`: name, parameters and id of each. Runs in which nothing differs are numbered in order of
    their ids, which begin with the time: 'digits #1', 'lr=0.1 #2'.
    """
    names = [name for name, _, _ in runs]
    given = [values for _, values, _ in runs]
    if len(set(names)) == len(names):
        return names
    differ = differing(given)[:MOST]
    several = len(set(names)) > 1
    labels = []
    for name, values, _ in runs:
        parts = [name] if several or not differ else []
        parts += [f"{each}={short(values[each])}" for each in differ if each in values]
        labels.append(excerpt(", ".join(parts) or name, LONGEST))
    unique = []
    for label, (_, _, id) in zip(labels, runs, strict=True):
        same = sorted(run[2] for other, run in zip(labels, runs, strict=True) if other == label)
        unique.append(f"{label} #{same.index(id) + 1}" if len(same) > 1 else label)
    return unique


def short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
