"""The first cell of a script: what it is, and what a notebook has that a script has not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from tpunb import __version__

ABOUT = """\
# %% [markdown]
# Made by tpunb {version} from {notebook}: what `%%tpu_train` runs there, line for line.
#
#     python script.py                          on one core
#     torchrun --nproc-per-node=4 script.py     on four
#
# `# %%` begins a cell (py:percent), so VS Code and Jupytext open this file as a notebook.

# %%
"""

PREPARE = """\
# With tpunb installed, a machine without a TPU has rehearsal cores, and launchers of
# torch_xla and accelerate run their function on this core.
import importlib.util as _util

if _util.find_spec("tpunb"):
    from tpunb.worker import standalone as _standalone

    _standalone.prepare()
    del _standalone
del _util
"""

# What a notebook has without an import, and how a script gets it.
BUILTINS = {
    "display": """\
try:
    from IPython.display import display
except ImportError:
    display = print
""",
    "get_ipython": """\


def get_ipython():
    \"\"\"Return None, as IPython's own does outside a notebook.\"\"\"
""",
}


def text(notebook: str | None, features: Sequence[str], missing: Sequence[str]) -> str:
    """The header, with its newline at the end.

    `features` are imported from `__future__`; `missing` are keys of `BUILTINS`.
    """
    name = PurePath(notebook).name if notebook else "a notebook"
    parts = [ABOUT.format(version=__version__, notebook=" ".join(name.split()))]
    if features:
        parts.append(f"from __future__ import {', '.join(sorted(set(features)))}\n\n")
    parts.append(PREPARE)
    parts += [f"\n{BUILTINS[name]}" for name in missing]
    return "".join(parts)
