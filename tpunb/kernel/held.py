"""What the kernel holds, read before a run starts: plain values, and digests of others.

Nothing is imported for it and no code of a user's class runs. Of large values a sample is read:
4 GB take as long as 4 MB.
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
"""Names of IPython's and of Python's own."""


class HeldNames(Container[str]):
    """The names whose values in a kernel are plain, and may be written into a script."""

    def __init__(self, user_ns: Mapping[str, object]) -> None:
        self._user_ns = user_ns

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or name not in self._user_ns or _OWN.fullmatch(name):
            return False
        return value_parts(name, self._user_ns[name], "")[0].literal is not None

    def __deepcopy__(self, memo: object) -> HeldNames:
        """This: nbconvert copies what its steps share, and a kernel's values are not copied."""
        return self


def read_kernel(names: Iterable[ReadName], user_ns: Mapping[str, object]) -> KernelValues:
    """The values of names that a train cell reads, as far as the kernel holds any to compare."""
    key = random_secrets.token_hex(16)
    found = []
    for read in names:
        if read.name not in user_ns or _OWN.fullmatch(read.name):
            continue
        parts = value_parts(read.name, user_ns[read.name], key)
        if read.cell is None and parts[0].literal is None:
            continue  # no cell makes it, and it cannot be taken either
        if not any(map(_says_something, parts)):
            continue
        related = all(_stays_itself(user_ns.get(other)) for other in read.related)
        takes = read.certain or (related and not read.of_process)
        found.append(KernelName(read.name, parts, read.cell, read.certain, takes, read.stale))
    return KernelValues(tuple(found), key)


def _says_something(part: Part) -> bool:
    return (
        part.literal is not None
        or part.digest is not None
        or part.secret is not None
        or part.kind is not PartKind.LEAF
    )


def _stays_itself(value: object) -> bool:
    """Whether a value is the same in the kernel and the run, or will be."""
    fixed = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
    return type(value) in fixed or literal(value) is not None
