"""Names that a magic makes in the notebook, and that are missing where it does not run."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from tpunb.script import scopes

SUBPROCESSES = (
    "bash",
    "sh",
    "script",
    "cmd",
    "perl",
    "ruby",
    "pypy",
    "python",
    "python2",
    "python3",
)
"""Cell magics made of `%%script`, whose `--out`, `--err` and `--proc` name variables."""

_OPTION = re.compile(r"--(?:out|err|proc)[ =]\s*(\w+)")
_ASSIGNED = re.compile(r"([^\W\d]\w*)\s*<<")  # jupysql and ipython-sql
_FROM_R = re.compile(r"-o\s*([\w,.]+)|--output[ =]\s*([\w,.]+)")  # rpy2
_CYTHON = re.compile(r"(?:cpdef|def|class|cdef\s+class)\s+(?:[\w\[\]:,.*]+\s+)*?(\w+)\s*[(:]")
_PYTHON = ("writefile", "file", *SUBPROCESSES)
"""Cell magics whose body may look like Python, but is not run in the notebook."""


def bound(name: str, argument: str, body: Sequence[str]) -> list[str]:
    """The names that `%name argument`, or `%%name argument` over a body, makes.

    Of magics of IPython, and of those of others that notebooks often load. A magic that is not
    known is taken to run its body if that is Python, as most do.
    """
    words = [word for word in argument.split() if not word.startswith("-")]
    if name == "capture":
        return words
    if name == "store":
        return words if "-r" in argument.split() else []
    if name in SUBPROCESSES:
        return _OPTION.findall(argument)
    if name == "sql":
        return _ASSIGNED.findall(argument)
    if name in ("R", "Rpull"):
        pairs = _FROM_R.findall(argument) if name == "R" else [(" ".join(words), "")]
        return [one for pair in pairs for one in re.split(r"[,\s]+", "".join(pair)) if one]
    if name in ("bigquery", "macro"):
        return words[:1]
    if name == "sc":
        return [word.partition("=")[0] for word in words[:1] if "=" in word]
    if name == "cython":
        return [match[1] for line in body if (match := _CYTHON.match(line))]
    return _of_code(body) if name not in _PYTHON else []


def _of_code(body: Sequence[str]) -> list[str]:
    try:
        tree = ast.parse("\n".join(body))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []
    return sorted(scopes.made(tree))
