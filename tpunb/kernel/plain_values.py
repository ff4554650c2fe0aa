"""Reads the kernel's variables before a run starts: plain values, and digests of others.

This imports nothing and runs no code of the user's classes. Only a sample of large values is
read: 4 GB take as long as 4 MB.
"""

from __future__ import annotations

import re
import secrets as random_secrets
import types
from collections.abc import Container, Iterable, Mapping

from tpunb.notebook.convert.kernel_names import ReadName
from tpunb.runs.kernel_values import KernelName, KernelValues, Part, PartKind, value_parts
from tpunb.utils.literals import literal

_OWN = re.compile(r"_{1,3}|_i{1,3}|_i?\d+|In|Out|_ih|_oh|_dh|__\w+__")
"""Names that belong to IPython or Python."""


class PlainKernelNames(Container[str]):
    """The names of plain values in the kernel, which may be written into a script."""

    def __init__(self, user_ns: Mapping[str, object]) -> None:
        self._user_ns = user_ns

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or name not in self._user_ns or _OWN.fullmatch(name):
            return False
        return value_parts(name, self._user_ns[name], "")[0].literal is not None

    def __deepcopy__(self, memo: object) -> PlainKernelNames:
        """Return self: nbconvert copies its steps' resources, but a kernel's values must not be."""
        return self


def read_kernel(names: Iterable[ReadName], user_ns: Mapping[str, object]) -> KernelValues:
    """Return the kernel's values of names that a train cell reads, if they can be compared."""
    key = random_secrets.token_hex(16)
    found = []
    for read in names:
        if read.name not in user_ns or _OWN.fullmatch(read.name):
            continue
        parts = value_parts(read.name, user_ns[read.name], key)
        if read.cell is None and parts[0].literal is None:
            continue  # no cell assigns it, and its value cannot be passed on
        if not any(map(_is_comparable, parts)):
            continue
        related = all(_stays_itself(user_ns.get(other)) for other in read.related)
        takes = read.certain or (related and not read.of_process)
        found.append(KernelName(read.name, parts, read.cell, read.certain, takes, read.stale))
    return KernelValues(tuple(found), key)


def _is_comparable(part: Part) -> bool:
    return (
        part.literal is not None
        or part.digest is not None
        or part.secret is not None
        or part.kind is not PartKind.LEAF
    )


def _stays_itself(value: object) -> bool:
    """True if a value is, or will be, the same in the kernel and in the run."""
    fixed = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
    return type(value) in fixed or literal(value) is not None
