"""Checkpoints."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpunb.lint.book import Book
from tpunb.lint.expressions import argument, call, dotted, last
from tpunb.lint.rules import Hit, rule
from tpunb.lint.walk import Site


@rule(
    "torch-save-on-xla",
    "warning",
    what="torch.save of a model that is on an XLA device",
    fact="the file holds XLA tensors and cannot be opened where torch_xla is not; on several cores "
    "every rank writes the same file at once",
    source="measured with torch_xla 2.9.0: torch.load gives tensors of xla:0; aws-neuron-sdk#1315",
    fix="write `xm.save(model.state_dict(), path)` on every rank, or move it to the CPU first",
)
def _torch_save_on_xla(book: Book) -> Iterator[Hit]:
    if not book.xla or not book.device_uses:
        return
    for site in book.calls_of("torch.save"):
        node = call(site)
        if not node.args or not _mentions_device(book, node.args[0], site):
            continue
        yield Hit(site, "what is saved is on the XLA device")


def _mentions_device(book: Book, value: ast.expr, site: Site) -> bool:
    """Whether a value holds the state of a model that was moved to an XLA device, not back."""
    inner = {last(part.func) for part in ast.walk(value) if isinstance(part, ast.Call)}
    if inner & {"cpu", "to", "_maybe_convert_to_cpu", "tree_map"}:
        return False
    if isinstance(value, ast.Name):
        values = book.values(value.id, site.frame)
        return bool(values) and all(
            isinstance(v.node, ast.Call | ast.Dict) and _mentions_device(book, v.node, v)
            for v in values
        )
    if isinstance(value, ast.DictComp):
        return False
    for part in ast.walk(value):
        if isinstance(part, ast.Call) and last(part.func) == "state_dict":
            assert isinstance(part.func, ast.Attribute | ast.Name)
            model = dotted(part.func.value) if isinstance(part.func, ast.Attribute) else ""
            if model and _is_moved(book, model, site):
                return True
    return False


def _is_moved(book: Book, model: str, site: Site) -> bool:
    """Whether the last move of a model before a site is to an XLA device."""
    moves = []
    for name in ("to", "cpu"):
        for other in book.called.get(name, ()):
            function = call(other).func
            if not isinstance(function, ast.Attribute):
                continue
            moved = dotted(function.value) == model or any(
                value.node is other.node for value in book.values(model, site.frame)
            )
            same = other.frame.function is site.frame.function
            before = (other.page.index, other.line) < (site.page.index, site.line)
            if moved and same and before:
                moves.append(other)
    if not moves:
        return False
    final = max(moves, key=lambda other: (other.page.index, other.line))
    target = argument(call(final), "device", 0)
    return target is not None and book.is_xla_device(target, final)


@rule(
    "load-to-xla",
    "error",
    what="torch.load with `map_location` an XLA device",
    fact="RuntimeError: don't know how to restore data location of "
    "torch.storage.UntypedStorage (tagged with xla:0)",
    source="measured with torch 2.9.0 and torch_xla 2.9.0",
    fix="write `torch.load(path, map_location='cpu')`, and move the model afterwards",
    kernel=True,
)
def _load_to_xla(book: Book) -> Iterator[Hit]:
    for site in book.calls_of("torch.load"):
        target = argument(call(site), "map_location", 1)
        if target is None or not _only_xla(book, target, site):
            continue
        yield Hit(site, "torch.load cannot put tensors on an XLA device")


def _only_xla(book: Book, node: ast.expr, site: Site) -> bool:
    if isinstance(node, ast.Name):
        values = book.values(node.id, site.frame)
        return bool(values) and all(
            isinstance(v.node, ast.expr) and book.is_xla_device(v.node, v) for v in values
        )
    return book.is_xla_device(node, site)
