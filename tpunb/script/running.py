"""`%run`: other notebooks and Python files, run in the middle of this one.

A notebook's cells are converted when the script is made, and the script holds them. A Python
file is run as it is when the script runs.
"""

from __future__ import annotations

import getopt
import shlex

from tpunb.script.leaving import NotPythonError

NOTEBOOK, FILE, MODULE = "_run_notebook", "_run_file", "_run_module"
HELPERS = (NOTEBOOK, FILE, MODULE)
"""The functions in a script's header that do it."""

# IPython.core.magics.execution, 7.34 to 9.18.
_OPTIONS = "nidtN:b:pD:l:rs:T:em:G"
_OTHERWISE = (
    "Import what you need from the file as a module, or tag the cell tpu-skip to leave it out of "
    "runs."
)


def call(argument: str, line: int) -> str:
    """The Python expression for `%run argument`. Raises NotPythonError, at this line."""
    try:
        words = shlex.split(argument)
        given, words = getopt.getopt(words, _OPTIONS)
    except (getopt.GetoptError, ValueError) as error:
        raise NotPythonError(f"`%run` cannot be understood: {error}", line) from None
    options = dict(given)
    if any(mark in argument for mark in "{$"):
        raise NotPythonError(
            f"what `%run` is to run is known in the notebook only: write it out. {_OTHERWISE}", line
        )
    if "-d" in options or "-b" in options:
        raise NotPythonError(f"`%run -d` asks for a debugger. {_OTHERWISE}", line)
    if "-m" in options:
        return _call(MODULE, [options["-m"], *words])
    if not words:
        raise NotPythonError(f"`%run` names no file. {_OTHERWISE}", line)
    if is_notebook(words[0]):
        return _call(NOTEBOOK, words[:1])
    path = words[0] if words[0].endswith(".py") else f"{words[0]}.py"
    more = ["shared=True"] if "-i" in options else []
    more += ["name=None"] if "-n" in options else []
    return _call(FILE, [path, *_expanded(words[1:], "-G" in options)], more)


def is_notebook(path: str) -> bool:
    """Whether `%run` reads cells from a file, instead of running it as a Python file."""
    return path.lower().endswith((".ipynb", ".ipy"))


def _expanded(words: list[str], literally: bool) -> list[str]:
    """Arguments with the names of the files that patterns stand for, as IPython has them."""
    from IPython.utils.path import shellglob

    patterned = not literally and any(set("*?[") & set(word) for word in words)
    return list(shellglob(words)) if patterned else words


def _call(name: str, words: list[str], more: list[str] | None = None) -> str:
    return f"{name}({', '.join([*map(repr, words), *(more or [])])})"
