"""Conversion of each magic: to plain Python, a comment, or an error.

`%run` becomes a call of a function in the script's header. The script contains the cells of
notebooks that it runs; Python files are read when the script runs.
"""

from __future__ import annotations

import getopt
import re
import shlex
from collections.abc import Sequence

from tpunb.notebook.convert import syntax
from tpunb.notebook.models import LeftOut
from tpunb.notebook.scopes import bound_names

# Options are in getopt's notation (IPython.core.magics.execution, 7.34 to 9.18).
TIMED = {"time": "", "timeit": "n:r:tcp:qov:", "prun": "D:l:rs:T:q"}
"""Line magics that run the statement that follows, and their options."""

UNWRAPPED = TIMED | dict.fromkeys(("time", "capture", "tpu_train", "wandb"))
"""Cell magics whose body is ordinary code of the notebook, and the options of those that run a
statement on their line; None for the others."""

SUBPROCESSES = frozenset("bash sh script cmd perl ruby pypy python python2 python3".split())
"""Cell magics based on `%%script`, whose `--out`, `--err` and `--proc` name variables."""

CELL_MAGICS = {
    "writefile": LeftOut.FILE_WRITTEN,
    "file": LeftOut.FILE_WRITTEN,
    **dict.fromkeys((*SUBPROCESSES, "system", "sx", "!"), LeftOut.SHELL),
    **dict.fromkeys(
        ("html", "HTML", "javascript", "js", "svg", "SVG", "latex", "markdown"),
        LeftOut.NOTEBOOK_ONLY,
    ),
}
"""Cell magics that are left out together with their cell."""

_LINE_MAGICS = {
    LeftOut.SHELL: (
        "system sx sc ls ll lf lk ldir lx mkdir rm rmdir cp mv cat less more man rehashx"
    ),
    LeftOut.INSTALL: "pip conda mamba micromamba uv",
    LeftOut.KERNEL_STATE: "env set_env cd pushd popd dhist dirs bookmark",
    LeftOut.NOTEBOOK_ONLY: (
        "matplotlib config load_ext reload_ext unload_ext autoreload pdb debug xmode precision "
        "who whos who_ls history hist pwd tensorboard lsmagic magic quickref reset load gui store "
        "aimport alias alias_magic unalias autoawait autocall automagic clear cls code_wrap colors "
        "connect_info doctest_mode edit ed killbgscripts loadpy logoff logon logstart logstate "
        "logstop macro notebook page pastebin pdef pdoc pfile pinfo pinfo2 pprint profile psearch "
        "psource pycat qtconsole recall rep reset_selective save subshell tb xdel"
    ),
}
CHANGE_FOLDER = ("cd", "pushd", "popd")
"""Line magics that a run repeats: each of its cells begins in the folder in which it ran."""
LINE_MAGICS = {name: why for why, names in _LINE_MAGICS.items() for name in names.split()}
"""Line magics that are left out: all of IPython's own except those below."""

REFUSED = {
    "pylab": "`%pylab` does not work in a script: write the imports that you need",
    "rerun": "`%rerun` does not work in a script: write the code that is to run again",
}
"""Line magics that run code, or bind names that later cells need."""

WITH_EFFECT = frozenset(
    "alias alias_magic bookmark ed edit load loadpy macro notebook recall rehashx rep reset "
    "reset_selective save sc store unalias xdel".split()
)
"""Line magics of use in a notebook only that do more than show something: not in a train cell."""

AUTOMAGIC = {*LINE_MAGICS, *REFUSED, *TIMED, "run"}
"""Line magics that IPython knows without their % in a cell of one line."""

ABOVE = "Write it in Python, or put it into a cell above the train cell."
OTHERWISE = "Or tag the cell tpu-skip to leave it out of runs."


class NotPythonError(Exception):
    """A line has no plain Python form. `line` is its line in the cell, from 1."""

    def __init__(self, reason: str, line: int, advice: str = OTHERWISE) -> None:
        super().__init__(reason, line, advice)
        self.reason = reason
        self.line = line
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.reason}. {self.advice}"


def why_left_out(name: str, known: dict[str, LeftOut]) -> LeftOut:
    if name.startswith("tpu_"):
        return LeftOut.TPUNB_MAGIC
    return known.get(name, LeftOut.UNKNOWN_MAGIC)


def timed_code(argument: str, options: str) -> str:
    """Return the code after the options of `%time` and similar: `-n 3 f(x)` gives `f(x)`."""
    words = argument.split()
    if words[:1] == ["--no-raise-error"]:  # an option of %time since IPython 9
        words, options = words[1:], ""
        argument = argument.partition("--no-raise-error")[2]
    try:
        _, code = getopt.getopt(words, options)
    except getopt.GetoptError:
        return argument.strip()
    taken = len(words) - len(code)
    return re.sub(r"\s*\S+", "", argument, count=taken).strip() if taken else argument.strip()


def timeit_call(names: Sequence[str], setup: str = "", made: Sequence[str] = ()) -> str:
    """Return the context manager for code of `%timeit` that binds names.

    `made` are the names that the setup code binds.
    """
    more = [f"setup={setup!r}"] if setup else []
    more += [f"makes={list(made)!r}"] if made else []
    return f"{TIMEIT}({', '.join([*map(repr, names), *more])})"


def aimport_statement(argument: str) -> str:
    """Return the imports that `%aimport a, b` makes; it also marks the modules for reloading."""
    names = [name.strip() for name in argument.split(",")]
    wanted = [name for name in names if name and not name.startswith("-")]
    dotted = all(part.isidentifier() for name in wanted for part in name.split("."))
    return f"import {', '.join(wanted)}" if wanted and dotted else ""


def value_expression(name: str, argument: str, expand: str) -> str | None:
    """Return a Python expression for the value of `x = %name argument`, if there is one.

    `expand` is the argument as a Python expression with variables filled in.
    """
    if name == "env" and argument and "=" not in argument and len(argument.split()) == 1:
        return f'__import__("os").environ[{expand}]'
    if name == "env" and not argument:
        return 'dict(__import__("os").environ)'
    if name == "pwd":
        return '__import__("os").getcwd()'
    return None


_OPTION = re.compile(r"--(?:out|err|proc)[ =]\s*(\w+)")
_ASSIGNED = re.compile(r"([^\W\d]\w*)\s*<<")  # jupysql and ipython-sql
_FROM_R = re.compile(r"-o\s*([\w,.]+)|--output[ =]\s*([\w,.]+)")  # rpy2
_CYTHON = re.compile(r"(?:cpdef|def|class|cdef\s+class)\s+(?:[\w\[\]:,.*]+\s+)*?(\w+)\s*[(:]")
_PYTHON = ("writefile", "file", *SUBPROCESSES)
"""Cell magics whose body may look like Python, but does not run in the notebook."""


def bound_by_magic(name: str, argument: str, body: Sequence[str]) -> list[str]:
    """Return the names that `%name argument`, or `%%name argument` with a body, binds.

    Covers IPython's magics, and others that notebooks often load. An unknown magic is assumed to
    run its body if the body is Python, as most do.
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
        return [name for pair in pairs for name in re.split(r"[,\s]+", "".join(pair)) if name]
    if name in ("bigquery", "macro"):
        return words[:1]
    if name == "sc":
        return [word.partition("=")[0] for word in words[:1] if "=" in word]
    if name == "cython":
        return [match[1] for line in body if (match := _CYTHON.match(line))]
    tree = None if name in _PYTHON else syntax.parsed(body)
    return [] if tree is None else sorted(bound_names(tree))


TIMEIT = "_tpunb_timeit"
"""Function in a script's header around the code of `%timeit` that binds names."""
TIME = "_tpunb_setup_time"
"""Function in a script's header around the code of `%time` and `%timeit` in a train cell."""

RUN_NOTEBOOK, RUN_FILE, RUN_MODULE = "_tpunb_run_notebook", "_tpunb_run_file", "_tpunb_run_module"
RUN_HELPERS = (RUN_NOTEBOOK, RUN_FILE, RUN_MODULE)
"""Functions in a script's header that replace `%run`."""

# IPython.core.magics.execution, 7.34 to 9.18.
_RUN_OPTIONS = "nidtN:b:pD:l:rs:T:em:G"
_RUN_OTHERWISE = (
    "Import what you need from the file as a module, or tag the cell tpu-skip to leave it out of "
    "runs."
)


def run_expression(argument: str, line: int) -> str:
    """Return the Python expression for `%run argument`. Raises NotPythonError, for this line."""
    try:
        words = shlex.split(argument)
        given, words = getopt.getopt(words, _RUN_OPTIONS)
    except (getopt.GetoptError, ValueError) as error:
        raise NotPythonError(f"cannot parse `%run`: {error}", line) from None
    options = dict(given)
    if any(mark in argument for mark in "{$"):
        raise NotPythonError(
            "the file that `%run` runs is only known in the notebook: write its name out",
            line,
            _RUN_OTHERWISE,
        )
    if "-d" in options or "-b" in options:
        raise NotPythonError("`%run -d` needs a debugger", line, _RUN_OTHERWISE)
    if "-m" in options:
        return _helper_call(RUN_MODULE, [options["-m"], *words])
    if not words:
        raise NotPythonError("`%run` names no file", line, _RUN_OTHERWISE)
    if words[0].lower().endswith((".ipynb", ".ipy")):  # a file with cells, not Python
        return _helper_call(RUN_NOTEBOOK, words[:1])
    path = words[0] if words[0].endswith(".py") else f"{words[0]}.py"
    more = ["shared=True"] if "-i" in options else []
    more += ["name=None"] if "-n" in options else []
    return _helper_call(RUN_FILE, [path, *_expanded(words[1:], "-G" in options)], more)


def _expanded(words: list[str], literally: bool) -> list[str]:
    """Replace patterns in arguments by the matching files, as IPython does."""
    from IPython.utils.path import shellglob

    patterned = not literally and any(set("*?[") & set(word) for word in words)
    return list(shellglob(words)) if patterned else words


def _helper_call(name: str, words: list[str], more: list[str] | None = None) -> str:
    return f"{name}({', '.join([*map(repr, words), *(more or [])])})"
