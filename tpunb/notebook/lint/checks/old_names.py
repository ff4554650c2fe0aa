"""Lint rules on names of older torch_xla: removed, deprecated, or superseded."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpunb.notebook import removed_apis
from tpunb.notebook.lint.checks.sites import is_tried, pins_older, words
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.rules import XLA, Hit, rule
from tpunb.notebook.scopes import Site, imported, literal


def _uses(notebook: NotebookIndex) -> Iterator[tuple[Site, removed_apis.RemovedApi]]:
    """Yield every use of a name of the table: an import, or an attribute or name that is read."""
    for site in notebook.sites.imports:
        for full in _imported(site.node):
            row = removed_apis.lookup_name(full)
            if row is not None:
                yield site, row
                break
    for site in notebook.sites.attributes(*_LASTS):
        node = site.node
        assert isinstance(node, ast.Attribute)
        if isinstance(node.ctx, ast.Load):
            full = notebook.full(node, site)
            row = removed_apis.lookup_name(full) if full else None
            # A module's own name is reported at its import and with each attribute read from it.
            if row is not None and not (row in removed_apis.MODULES or _is_module(full)):
                yield site, row
    for site in notebook.called.get("getattr", ()):
        row = removed_apis.lookup_name(_by_getattr(notebook, site))
        if row is not None:
            yield site, row
    yield from _star_imported(notebook)
    imports = (pair for site in notebook.sites.imports for pair in imported(site.node))
    for name, full in dict(imports).items():
        row = removed_apis.lookup_name(full) if full else None
        if (
            row is not None
            and row.state not in ("missing", "restored")
            and row not in removed_apis.MODULES
        ):
            for site in notebook.sites.loads(name):
                yield site, row


def _by_getattr(notebook: NotebookIndex, site: Site) -> str:
    """Return the full name that `getattr(module, 'name')` reads; '' if there is a default."""
    node = site.call
    if len(node.args) != 2 or notebook.full(node.func, site) != "getattr":
        return ""
    module, name = notebook.full(node.args[0], site), literal(node.args[1])
    return f"{module}.{name}" if module and isinstance(name, str) else ""


def _star_imported(notebook: NotebookIndex) -> Iterator[tuple[Site, removed_apis.RemovedApi]]:
    """Yield reads of names that only `from module import *` can have bound in the past."""
    stars = (site.node for site in notebook.sites.stars)
    froms = (node for node in stars if isinstance(node, ast.ImportFrom))
    modules = {"" if node.level else node.module or "" for node in froms}
    if not all(module.partition(".")[0] in ("torch", "torch_xla") for module in modules):
        return  # another module may define them
    for row in removed_apis.NAMES:
        module, _, name = row.old.rpartition(".")
        if module in modules and not notebook.sites.binds(name):
            yield from ((site, row) for site in notebook.sites.loads(name))


_LASTS = sorted({row.old.rpartition(".")[2] for row in removed_apis.NAMES})


def _is_module(full: str) -> bool:
    return any(full == row.old for row in removed_apis.MODULES)


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        if any(node.module == row.old for row in removed_apis.MODULES):
            return [node.module]
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _for_old_releases(site: Site) -> bool:
    """Whether the code allows for a missing name: it is in `try`, or under a condition on the
    version or the attribute.
    """
    asked = {word for test, _ in site.conditions() for word in words(test)}
    return is_tried(site) or "hasattr" in asked or any("version" in word for word in asked)


def _short(full: str) -> str:
    return full.removeprefix("torch_xla.core.").removeprefix("torch_xla.distributed.")


RETIRED = "retired-name"


@rule(
    RETIRED,
    "error",
    what="a module, function or argument that torch_xla 2.9, Lightning 2, transformers 5 or "
    "numpy 2 does not have",
    why="ImportError, AttributeError or TypeError when the line runs (each name was looked up in "
    "torch_xla 2.9.0, lightning 2.6.6, transformers 5.24.0 and numpy 2.4.6)",
    fix="use its replacement",
    kernel=True,
)
def _retired_name(notebook: NotebookIndex) -> Iterator[Hit]:
    for site, row in _uses(notebook):
        if row.old.startswith("torch_xla") and notebook.backend != "xla":
            continue  # it has no torch_xla at all
        if row.state == "missing" and not _for_old_releases(site):
            yield Hit(
                site,
                f"`{_short(row.old)}` does not exist in torch_xla 2.9",
                row.advice,
                certain=row.since != "2.9",  # the torch_xla 2.8 of Kaggle has it
            )
    for site, what, fix in (*_numpy(notebook), *_lightning(notebook), *_transformers(notebook)):
        if not _for_old_releases(site):
            yield Hit(site, what, fix)


def _numpy(notebook: NotebookIndex) -> Iterator[tuple[Site, str, str]]:
    sites = notebook.sites.attributes(*NUMPY)
    for site in [] if pins_older(notebook, "numpy", (2, 0)) else sites:
        node = site.node
        assert isinstance(node, ast.Attribute)
        full = notebook.full(node, site)
        if isinstance(node.ctx, ast.Load) and full == f"numpy.{node.attr}":
            yield site, f"`{full}` does not exist in numpy 2", f"write `{NUMPY[node.attr]}`"


NUMPY = {
    **dict.fromkeys(("Inf", "Infinity", "PINF", "infty"), "np.inf"),
    **{"NINF": "-np.inf", "NaN": "np.nan", "float_": "np.float64", "complex_": "np.complex128"},
    **{"unicode_": "np.str_", "string_": "np.bytes_", "int": "int", "float": "float"},
    **{"object": "object", "complex": "complex", "str": "str", "product": "np.prod"},
    **{"cumproduct": "np.cumprod", "alltrue": "np.all", "sometrue": "np.any"},
    **{"round_": "np.round", "cast": "np.asarray(x, dtype)", "msort": "np.sort"},
    **{"asfarray": "np.asarray(x, dtype=float)", "mat": "np.asmatrix"},
}
"""Names that numpy 2 does not have, and what replaces them."""


def _lightning(notebook: NotebookIndex) -> Iterator[tuple[Site, str, str]]:
    old = pins_older(notebook, r"(?:pytorch[-_])?lightning", (2, 0))
    for site in [] if old else notebook.called.get("Trainer", []):
        if _TRAINER.fullmatch(notebook.full(site.call.func, site)):
            for word in site.call.keywords:
                if word.arg in TRAINER_ARGUMENTS:
                    what = f"`Trainer({word.arg}=…)` does not exist in Lightning 2"
                    yield Site(word.value, site.frame), what, TRAINER_ARGUMENTS[word.arg]


_TRAINER = re.compile(r"(?:pytorch_lightning|lightning(?:\.pytorch)?)(?:\.trainer){0,2}\.Trainer")
_CORES = (
    'write `accelerator="tpu", devices="auto"`; `%%tpu_train --cores 8` chooses the number of cores'
)
TRAINER_ARGUMENTS = {
    "tpu_cores": _CORES,
    "num_tpu_cores": _CORES,
    "progress_bar_refresh_rate": "write `callbacks=[TQDMProgressBar(refresh_rate=20)]`, or "
    "`enable_progress_bar=False` for 0",
}
"""Arguments that Lightning 2 removed, and what replaces them."""


def _transformers(notebook: NotebookIndex) -> Iterator[tuple[Site, str, str]]:
    names = {"transformers.AdamW", "transformers.optimization.AdamW"}
    sites = [site for site in notebook.sites.imports if names & {*_imported(site.node)}]
    reads = notebook.sites.attributes("AdamW")
    sites += [site for site in reads if notebook.full(site.node, site) in names]
    for site in sites if not pins_older(notebook, "transformers", (4, 50)) else ():
        fix = "write `torch.optim.AdamW`; the old defaults were `eps=1e-6, weight_decay=0.0`"
        yield site, "`transformers.AdamW` does not exist since transformers 4.50", fix


_STATES = {"deprecated": "is deprecated", "restored": "is gone from torch_xla"}


@rule(
    "old-name",
    "hint",
    what="a name of torch_xla that works, in runs of tpunb at least, but has a successor",
    why="removed names exist in runs only; deprecated ones warn (torch_xla 2.9.0, "
    "core/xla_model.py: `@deprecated`)",
    fix="use the current name",
    kernel=True,
    backends=XLA,
)
def _old_name(notebook: NotebookIndex) -> Iterator[Hit]:
    seen = set()
    for site, row in _uses(notebook):
        if row.state in ("restored", "deprecated", "legacy") and row.old not in seen:
            if isinstance(site.node, ast.ImportFrom):
                continue  # reported at its uses
            seen.add(row.old)
            word = _STATES.get(row.state, "is the old way")
            fix = row.advice
            if row.new == "torch_xla.launch" and site.cell.part != "train":
                fix += " In a notebook without %%tpu_train it needs start_method='fork'."
            yield Hit(site, f"`{_short(row.old)}` {word}", fix)
