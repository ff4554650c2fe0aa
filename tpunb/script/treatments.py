"""What becomes of each magic: kept as plain Python, left out for a reason, or refused."""

from __future__ import annotations

import getopt
import re

SHELL = "shell commands run once, in the notebook"
INSTALL = "the run uses the packages that are installed now"
STATE = "the run starts with the kernel's environment and directory"
SHOWN = "of use in a notebook only"
HELP = "help is shown in a notebook only"
WRITTEN = "the file is there since the cell ran in the notebook"
OWN = "tpunb's own commands are not part of a run"

UNWRAPPED = {
    # The options of those that take a statement on the magic's line, in getopt's words
    # (IPython.core.magics.execution, 7.34 to 9.18). None: nothing there is code.
    "time": None,
    "capture": None,
    "tpu_train": None,
    "wandb": None,
    "timeit": "n:r:tcp:qov:",
    "prun": "D:l:rs:T:q",
}
"""Cell magics whose body is ordinary code of the notebook."""

STATEMENTS = {"time": "", "timeit": "n:r:tcp:qov:", "prun": "D:l:rs:T:q"}
"""Line magics that run the statement behind them, and their options."""

CELLS = {
    "writefile": WRITTEN,
    "file": WRITTEN,
    **dict.fromkeys(("bash", "sh", "script", "system", "sx", "!", "cmd", "perl"), SHELL),
    **dict.fromkeys(("ruby", "pypy", "python", "python2", "python3"), SHELL),
    **dict.fromkeys(("html", "HTML", "javascript", "js", "svg", "SVG", "latex", "markdown"), SHOWN),
}
"""Cell magics that are left out whole."""

LINES = {
    **dict.fromkeys(("system", "sx", "sc", "ls", "ll", "lf", "lk", "ldir", "lx", "mkdir"), SHELL),
    **dict.fromkeys(("rm", "rmdir", "cp", "mv", "cat", "less", "more", "man", "rehashx"), SHELL),
    **dict.fromkeys(("pip", "conda", "mamba", "micromamba", "uv"), INSTALL),
    **dict.fromkeys(("env", "set_env", "cd", "pushd", "popd", "dhist", "dirs", "bookmark"), STATE),
    **dict.fromkeys(
        (
            *("matplotlib", "config", "load_ext", "reload_ext", "unload_ext", "autoreload", "pdb"),
            *("debug", "xmode", "precision", "who", "whos", "who_ls", "history", "hist", "pwd"),
            *("tensorboard", "lsmagic", "magic", "quickref", "reset", "load", "gui", "store"),
            *("aimport", "alias", "alias_magic", "unalias", "autoawait", "autocall", "automagic"),
            *("clear", "cls", "code_wrap", "colors", "connect_info", "doctest_mode", "edit", "ed"),
            *("killbgscripts", "loadpy", "logoff", "logon", "logstart", "logstate", "logstop"),
            *("macro", "notebook", "page", "pastebin", "pdef", "pdoc", "pfile", "pinfo", "pinfo2"),
            *("pprint", "profile", "psearch", "psource", "pycat", "qtconsole", "recall", "rep"),
            *("reset_selective", "save", "subshell", "tb", "xdel"),
        ),
        SHOWN,
    ),
}
"""Line magics that are left out: all of IPython's own but those below."""

REFUSED = {
    "pylab": "`%pylab` does not work in a script: write the imports that you need",
    "rerun": "`%rerun` does not work in a script: write the code that is to run again",
}
"""Line magics that run code, or bind names that later cells need."""

AUTOMAGIC = {*LINES, *REFUSED, *STATEMENTS, "run"}
"""Line magics that IPython knows without their % in a cell of one line."""

OTHERWISE = "Or tag the cell tpu-skip to leave it out of runs."


def reason(name: str, known: dict[str, str]) -> str:
    """Why a magic is left out."""
    if name.startswith("tpu_"):
        return OWN
    return known.get(name, "tpunb does not know this magic, so what it does is missing here")


def statement(argument: str, options: str) -> str:
    """The code behind the options of `%time` and its like: `-n 3 f(x)` gives `f(x)`."""
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


def imported(argument: str) -> str:
    """The imports that `%aimport a, b` does beside telling what is to be reloaded."""
    names = [name.strip() for name in argument.split(",")]
    wanted = [name for name in names if name and not name.startswith("-")]
    dotted = all(part.isidentifier() for name in wanted for part in name.split("."))
    return f"import {', '.join(wanted)}" if wanted and dotted else ""


def value(name: str, argument: str, expand: str) -> str | None:
    """The plain Python expression for the value of `x = %name argument`, if there is one.

    `expand` is the argument as a Python expression with variables filled in.
    """
    if name in ("sx", "system"):
        return output(expand)
    if name == "env" and argument and "=" not in argument and len(argument.split()) == 1:
        return f'__import__("os").environ[{expand}]'
    if name == "env" and not argument:
        return 'dict(__import__("os").environ)'
    if name == "pwd":
        return '__import__("os").getcwd()'
    return None


def output(command: str) -> str:
    """A Python expression for the lines that a command writes (as `x = !command` gives them)."""
    return f'__import__("subprocess").getoutput({command}).splitlines()'
