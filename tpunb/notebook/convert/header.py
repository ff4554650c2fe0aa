"""Header of a script: a description, and definitions of names that are built into notebooks."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath

from tpunb.notebook.convert import earlier_values, export, magics
from tpunb.utils import one_rank
from tpunb.utils.version import __version__

ABOUT = """\
# %% [markdown]
# Made by tpunb {version} from {notebook}: the code that `%%tpu_train` runs there, line for line.
#
{how}#
{notes}# `# %%` begins a cell (py:percent), so VS Code and Jupytext open this file as a notebook.

# %%
# Imports stand where the notebook has them.
# ruff: isort: skip_file

"""

RANKS = """\
#     python script.py                          on one core
#     torchrun --nproc-per-node=4 script.py     on four
"""

SPMD = """\
#     python script.py                          all cores of a TPU: one process drives them (SPMD)
#     CPU_NUM_DEVICES=4 python script.py        the same on four devices of a CPU
#
# Not `torchrun --nproc-per-node=4`: that would make four processes, and SPMD needs one on a host.
"""

# The function is inside a `try`, because linters require imports above other code.
_SOURCE = inspect.getsource(one_rank.set_variables).replace("set_variables", "_tpunb_one_rank")
ONE_RANK = f"""\
# `python script.py` is one rank, with torchrun's variables.
try:

{textwrap.indent(_SOURCE, "    ")}
    _tpunb_one_rank()
finally:
    del _tpunb_one_rank

"""

PREPARE = """\
# With tpunb installed, a machine without a TPU has rehearsal cores, and launchers of
# torch, torch_xla and accelerate run their function on this core.
import importlib.util as _tpunb_util

try:
    if _tpunb_util.find_spec("tpunb"):
        from tpunb.worker import standalone as _tpunb_standalone

        _tpunb_standalone.prepare({arguments})
        del _tpunb_standalone
finally:
    del _tpunb_util
"""

# Definitions of names that notebooks have without an import. All are inside a `try`, because
# linters require imports above other code, and imports follow in the cells.
BUILTINS = {
    "display": """\
try:
    from IPython.display import display
except ImportError:
    display = print
""",
    "get_ipython": """\
try:
    from IPython import get_ipython
except ImportError:

    def get_ipython():
        \"\"\"Return None, as IPython's own does outside a notebook.\"\"\"
""",
}


# The functions of `magics.RUN_HELPERS`, `magics.TIMEIT`, `earlier_values.in_place`
# and `statements.AWAIT_HELPER`, for cells that need them.
HELPERS = {
    earlier_values.HELPER: earlier_values.FROM_RANK_0,
    earlier_values.CALL_HELPER: earlier_values.CALL_HERE,
    "_tpunb_await": """\

_TPUNB_LOOPS = {}


def _tpunb_await(what):
    \"\"\"Await an object, or a function's return value, on this process's event loop.\"\"\"
    import asyncio
    import os

    async def wait():
        return await (what() if callable(what) else what)

    process = os.getpid()  # a loop does not survive a fork
    if process not in _TPUNB_LOOPS:
        _TPUNB_LOOPS[process] = asyncio.new_event_loop()
        asyncio.set_event_loop(_TPUNB_LOOPS[process])
    return _TPUNB_LOOPS[process].run_until_complete(wait())


def _tpunb_in_loop(function, *arguments, **options):
    \"\"\"Call a function that needs a running event loop, such as `asyncio.create_task`.\"\"\"

    async def call():
        return function(*arguments, **options)

    return _tpunb_await(call)
""",
    magics.TIMEIT: """\

import contextlib as _tpunb_contextlib


@_tpunb_contextlib.contextmanager
def _tpunb_timeit(*names, setup="", makes=()):
    \"\"\"Run code of `%timeit` once, after its setup. Its names do not stay, as in IPython.\"\"\"
    own = globals()
    names = {*names, *makes}
    before = {name: own[name] for name in names if name in own}
    exec(setup, own)  # noqa: S102
    try:
        yield [own.get(name) for name in makes]
    finally:
        for name in names:
            own.pop(name, None)
        own.update(before)
""",
    "_tpunb_run_notebook": """\


def _tpunb_run_notebook(path):
    \"\"\"Run the code cells of another notebook in this namespace, as `%run` does.\"\"\"
    import linecache

    for place, source in _TPUNB_NOTEBOOKS[path]:
        lines = [f"{line}\\n" for line in source.split("\\n")]
        linecache.cache[place] = (len(source), None, lines, place)
        exec(compile(source, place, "exec", dont_inherit=True), globals())  # noqa: S102
""",
    "_tpunb_run_file": """\


def _tpunb_run_file(path, *arguments, name="__main__", shared=False):
    \"\"\"Run a Python file with these arguments and import its names, as `%run` does.\"\"\"
    import os
    import sys

    own = {"__name__": name or os.path.splitext(os.path.basename(path))[0], "__file__": path}
    names = globals() if shared else own
    argv, folder = sys.argv, os.path.dirname(os.path.abspath(path))
    sys.argv = [path, *arguments]
    sys.path.insert(0, folder)
    try:
        with open(path, "rb") as file:
            exec(compile(file.read(), path, "exec", dont_inherit=True), names)  # noqa: S102
    except SystemExit as error:
        if error.code:
            raise
    finally:
        sys.argv = argv
        sys.path.remove(folder)
    if not shared:
        globals().update((key, value) for key, value in own.items() if key[:2] != "__")
""",
    "_tpunb_run_module": """\


def _tpunb_run_module(name, *arguments):
    \"\"\"Run a module with these arguments and import its names, as `%run -m` does.\"\"\"
    import runpy
    import sys

    argv = sys.argv
    sys.argv = [name, *arguments]
    try:
        own = runpy.run_module(name, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = argv
    globals().update((key, value) for key, value in own.items() if key[:2] != "__")
""",
}


def header_text(
    notebook: str | None,
    features: Sequence[str],
    missing: Sequence[str],
    helpers: Collection[str] = (),
    notebooks: Mapping[str, Sequence[tuple[str, str]]] | None = None,
    *,
    spmd: bool = False,
    arguments: str = "",
    notes: Sequence[str] = (),
    prepare: str | None = None,
    for_export: bool = False,
    lines: str = "",
) -> str:
    """Return the header, with a newline at its end.

    `features` are imported from `__future__`; `missing` are keys of `BUILTINS`, `helpers` keys of
    `HELPERS`; `notebooks` are the cells of notebooks that `%run` runs; `spmd` is True if one
    process drives all cores; `arguments` are those of the call that prepares a process. `notes`
    are lines for the reader; `prepare` replaces `PREPARE`, and contains the functions that `lines`,
    the code of the cells with shell lines and the like, calls; `for_export` is True if the script
    is for another machine.
    """
    name = PurePath(notebook).name if notebook else "a notebook"
    how = SPMD if spmd else RANKS
    noted = "".join(f"# {line}".rstrip() + "\n" for line in notes)
    title = " ".join(name.split())
    parts = [ABOUT.format(version=__version__, notebook=title, how=how, notes=noted)]
    if features:
        parts.append(f"from __future__ import {', '.join(sorted(set(features)))}\n\n")
    parts += [ONE_RANK] if for_export and not spmd else []
    parts.append(prepare or PREPARE.format(arguments=arguments))
    if lines and not prepare:
        parts.append(f"\n{export.functions(lines, done=True)}\n")
    parts += [f"\n{BUILTINS[name]}" for name in missing]
    if notebooks:
        cells = _notebook_cells(notebooks)
        parts.append(f"\n# What `%run` runs.\n_TPUNB_NOTEBOOKS = {{\n{cells}}}\n")
    parts += [HELPERS[name] for name in HELPERS if name in helpers]
    return "".join(parts)


def _notebook_cells(notebooks: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """Write the cells of notebooks as literals, one source line on each line."""
    lines = []
    for path, cells in notebooks.items():
        lines.append(f"    {path!r}: [")
        for place, source in cells:
            *ended, last = source.split("\n")
            texts = [*(repr(f"{line}\n") for line in ended), repr(last)]
            lines += ["        (", f"            {place!r},", "            ("]
            lines += [f"                {text}" for text in texts]
            lines += ["            ),", "        ),"]
        lines.append("    ],")
    return "".join(f"{line}\n" for line in lines)
