"""Cells that cannot be read, and names that nothing binds."""

from __future__ import annotations

from collections.abc import Iterator

from tpunb.lint.book import Book
from tpunb.lint.findings import Severity
from tpunb.lint.rules import Hit, rule

USUAL = {
    "xm": "import torch_xla.core.xla_model as xm",
    "xmp": "import torch_xla.distributed.xla_multiprocessing as xmp",
    "xr": "import torch_xla.runtime as xr",
    "torch_xla": "import torch_xla",
}
"""Names that notebooks give to modules of torch_xla, and how they are imported."""


@rule(
    "not-python",
    "error",
    what="a cell that is not Python",
    fact="a run is a Python script; what only IPython understands has no place in it",
    source="Python's own parser, and IPython's for magics",
    fix="mend the cell, or tag it tpu-skip to leave it out of runs",
)
def _not_python(book: Book) -> Iterator[Hit]:
    for page in book.pages:
        if page.problem is not None and page.part != "kernel":
            line, reason = page.problem
            in_words = reason.partition(". Or tag")[0]
            severity = None if book.has_train or in_words.startswith("it is") else "hint"
            yield Hit((page, line), in_words, severity=severity)  # type: ignore[arg-type]


@rule(
    "missing-import",
    "error",
    what="`xm.`, `xmp.`, `xr.` or `torch_xla.` without an import in the notebook",
    fact="NameError on every core",
    source="Python",
    fix="import it in a cell above",
    kernel=True,
)
def _missing_import(book: Book) -> Iterator[Hit]:
    if any(page.problem for page in book.pages):
        return  # the import may stand in the cell that cannot be read
    for name, line in USUAL.items():
        if book.names.bound(name):
            continue
        for site in book.sites.loads(name)[:1]:
            always = site.simple() or not any(site.conditions())
            severity: Severity | None = None if always else "warning"
            fix = f"write `{line}` in a cell above"
            yield Hit(site, f"`{name}` is never imported", fix, severity=severity)
