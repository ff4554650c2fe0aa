"""Lint rules on names of older torch_xla: removed, deprecated, or replaced by something better."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpunb.notebook import removed_apis
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.names import words
from tpunb.notebook.lint.rules import Hit, rule
from tpunb.notebook.lint.walk import Site

_MIGRATE = "`tpunb migrate` does it for the whole notebook."
_MARK = "`tpunb migrate` marks each place."


def _uses(notebook: NotebookIndex) -> Iterator[tuple[Site, removed_apis.RemovedApi]]:
    """Every use of a name of the table: an import, or an attribute or name that is read."""
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
            # A module's own name is found where it is imported, and again in what follows it.
            if row is not None and not (row in removed_apis.MODULES or _is_module(full)):
                yield site, row
    for name, targets in notebook.names.imported.items():
        row = removed_apis.lookup_name(targets[-1]) if targets[-1] else None
        if row is not None and row.state != "missing" and row not in removed_apis.MODULES:
            for site in notebook.sites.loads(name):
                yield site, row


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
    """Whether the code knows that the name may be missing: in `try`, or under a test that asks
    for the version or the attribute.
    """
    if any(isinstance(frame.node, ast.Try | ast.ExceptHandler) for frame in site.frame.outward()):
        return True
    return any(
        "hasattr" in words(test) or any("version" in word for word in words(test))
        for test, _ in site.conditions()
    )


def _short(full: str) -> str:
    return full.removeprefix("torch_xla.core.").removeprefix("torch_xla.distributed.")


@rule(
    "retired-name",
    "error",
    what="a module or function that torch_xla 2.9 has not got",
    fact="ImportError or AttributeError where the line runs",
    source="each name was looked up in torch_xla 2.9.0",
    fix="use what replaced it; `tpunb migrate` rewrites the notebook",
    kernel=True,
)
def _retired_name(notebook: NotebookIndex) -> Iterator[Hit]:
    for site, row in _uses(notebook):
        if row.state == "missing" and not _for_old_releases(site):
            yield Hit(
                site,
                f"`{_short(row.old)}` does not exist in torch_xla 2.9",
                f"{row.advice} {_MIGRATE if row.new else _MARK}",
                certain=True,
            )


@rule(
    "old-name",
    "hint",
    what="a name of torch_xla that still works and has a successor",
    fact="deprecated names warn, and may be gone in the next release",
    source="torch_xla 2.9.0, core/xla_model.py: `@deprecated`",
    fix="use the current name; `tpunb migrate` rewrites the notebook",
    kernel=True,
)
def _old_name(notebook: NotebookIndex) -> Iterator[Hit]:
    seen = set()
    for site, row in _uses(notebook):
        if row.state in ("deprecated", "legacy") and row.old not in seen:
            if isinstance(site.node, ast.ImportFrom):
                continue  # it is shown where it is used
            seen.add(row.old)
            word = "is deprecated" if row.state == "deprecated" else "is the old way"
            fix = row.advice
            if row.new == "torch_xla.launch" and site.cell.part != "train":
                fix += " In a notebook without %%tpu_train it needs start_method='fork'."
            yield Hit(site, f"`{_short(row.old)}` {word}", fix)
