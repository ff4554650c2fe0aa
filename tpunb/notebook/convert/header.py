"""Header of a script: a description, and the functions that its cells call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath

from tpunb.utils import one_rank
from tpunb.utils.version import __version__

ABOUT = """\
# %% [markdown]
# Made by tpunb {version} from {notebook}: the code that `%%tpu_train` runs there, line for line.
{how}#
{notes}# `# %%` begins a cell (py:percent), so VS Code and Jupytext open this file as a notebook.

# %%
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

_SETS_VARIABLE = re.compile(r"^\s*os\.environ\[.*\] = ", re.MULTILINE)
"""A line that was `%env`, or one like it."""
HELPERS = Path(__file__).parent / "templates" / "header" / "helpers.py"
_NAME = re.compile(r"(?:def )?(\w+)")
_DONE = '"done": __name__ == "__mp_main__"'
ONE_RANK = "_tpunb_one_rank"


def header_text(
    notebook: str | None,
    features: Sequence[str],
    missing: Sequence[str],
    notebooks: Mapping[str, Sequence[tuple[str, str]]] | None = None,
    *,
    spmd: bool = False,
    notes: Sequence[str] = (),
    code: str = "",
    prepare: str | None = None,
    calls: Sequence[str] = (),
    done: bool = True,
) -> str:
    """Return the header, with a newline at its end.

    `features` are imported from `__future__`; `missing` are keys of `BUILTINS`; `notebooks` are
    the cells of notebooks that `%run` runs; `spmd` is True if one process drives all cores;
    `notes` are lines for the reader. The header defines the helpers that `code` uses. `prepare`:
    the arguments with which a run's script prepares its process; None for an exported script,
    which does it by `calls` of helpers. `done`: the lines above the train cell have run.
    """
    name = PurePath(notebook).name if notebook else "a notebook"
    how = SPMD if spmd else RANKS
    noted = "".join(f"# {line}".rstrip() + "\n" for line in notes)
    title = " ".join(name.split())
    parts = [ABOUT.format(version=__version__, notebook=title, how=how, notes=noted)]
    if features:
        parts.append(f"from __future__ import {', '.join(sorted(set(features)))}\n\n")
    helpers = functions("\n".join([code, *calls]))
    if prepare is not None:
        parts.append(PREPARE.format(arguments=prepare))
        helpers = f"\n{helpers}" if helpers else ""
    if done:
        helpers = helpers.replace(_DONE, '"done": True')
    parts += [helpers, "\n" * bool(calls), *(f"{call}\n" for call in calls)]
    parts += [f"\n{BUILTINS[name]}" for name in missing]
    if notebooks:
        cells = _notebook_cells(notebooks)
        parts.append(f"\n# What `%run` runs.\n_TPUNB_NOTEBOOKS = {{\n{cells}}}\n")
    return "".join(parts)


def functions(code: str) -> str:
    """Return the helpers that code uses, and those that these use, with their imports."""
    imports, helpers = _helpers()
    kept = ""
    for name, source in helpers.items():
        if name in code + kept and re.search(rf"\b{name}\b", code + kept):
            kept += f"\n{source}\n"
    sets = kept + "".join(_SETS_VARIABLE.findall(code))
    used = [line for line in imports if re.search(rf"\b{line.split()[1]}\.", sets)]
    return "".join(f"{line}\n" for line in used) + kept


@cache
def _helpers() -> tuple[list[str], dict[str, str]]:
    """The lines of the imports, and the text of each helper by its name."""
    head, *texts = HELPERS.read_text(encoding="utf-8").rstrip().split("\n\n\n")
    one_process = inspect.getsource(one_rank.set_variables).rstrip()
    texts.append(one_process.replace("set_variables() -> None", f"{ONE_RANK}()"))
    named = {_NAME.match(text)[1]: text for text in texts}  # type: ignore[index]
    return [line for line in head.split("\n") if line.split()[:1] == ["import"]], named


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
