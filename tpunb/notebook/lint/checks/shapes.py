"""Lint rules on shapes that change from step to step: XLA compiles a program for each shape."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpunb.notebook.lint.checks.loops import from_host
from tpunb.notebook.lint.checks.sites import receiver
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.rules import TPUS, Hit, rule
from tpunb.notebook.scopes import DefinedFunction, Site, argument, dotted, last_part, literal

METHODS = ("nonzero", "masked_select", "unique", "unique_consecutive")
FUNCTIONS = [f"torch.{name}" for name in METHODS]
MULTIPLE = "pad_to_multiple_of"
PADDING = ("pad", "batch_encode_plus", "encode_plus")


@rule(
    "changing-shape",
    "warning",
    what="nonzero, unique, masked_select, `torch.where(mask)` and `x[mask]` in the step",
    why="the size of the result depends on the values: Python waits for the device, and every new "
    "size needs a new program (measured with torch_xla 2.9.0; pytorch/xla's docs on dynamic "
    "shapes; torch_tpu 0.2.0 pads for the same reason, _internal/ops/jagged.py)",
    fix="keep the size and use the mask: `torch.where(mask, x, 0)`, or "
    "`(x * mask).sum() / mask.sum()`",
    backends=TPUS,
)
def _changing_shape(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.xla and not notebook.on_device:
        return
    for site in _on_device(notebook):
        node = site.call
        full, name, owner = notebook.full(node.func, site), last_part(node.func), receiver(site)
        alone = len(node.args) == 1 and not node.keywords
        if full in FUNCTIONS or (full == "torch.where" and alone):
            yield Hit(site, f"the size of the result of `{full}` depends on the values")
        elif name in METHODS and not full and owner is not None:
            bare = name == "masked_select" or not node.args
            if bare and not _of_host(notebook, owner, site):
                yield Hit(site, f"the size of the result of `.{name}()` depends on the values")
    loops = {id(loop.frame) for loop in notebook.loops}
    for site in notebook.sites.subscripts:
        subscript = site.node
        assert isinstance(subscript, ast.Subscript)
        if not isinstance(subscript.ctx, ast.Load) or not _is_mask(notebook, subscript.slice, site):
            continue
        in_loop = any(id(frame) in loops for frame in site.frame.outward())
        if (in_loop or _is_forward(site.frame.function)) and not _of_host(
            notebook, subscript.value, site
        ):
            yield Hit(site, "the size of `x[mask]` depends on the values")


def _on_device(notebook: NotebookIndex) -> list[Site]:
    """The calls that certainly run with tensors of the TPU: in training loops and in `forward`."""
    sites = [site for loop in notebook.loops for site in (*loop.sites, *loop.called)]
    forward = filter(_is_forward, notebook.functions.get("forward", ()))
    sites += [site for function in forward for site in function.calls]
    return list({id(site): site for site in sites}.values())


def _is_forward(function: DefinedFunction | None) -> bool:
    return function is not None and function.name == "forward" and function.method_of is not None


def _is_mask(notebook: NotebookIndex, index: ast.expr, site: Site) -> bool:
    """Whether an index is a comparison with a tensor: `x[y > 0]`, `x[mask]` with `mask = y > 0`."""
    if isinstance(index, ast.Compare):
        return len(index.ops) == 1 and isinstance(
            index.ops[0], ast.Gt | ast.GtE | ast.Lt | ast.LtE | ast.Eq | ast.NotEq
        )
    if isinstance(index, ast.Name):
        values = notebook.values(index.id, site.frame)
        return bool(values) and all(
            isinstance(v.node, ast.Compare) and _is_mask(notebook, v.node, v) for v in values
        )
    return False


def _of_host(notebook: NotebookIndex, node: ast.expr, site: Site) -> bool:
    """Whether a value visibly comes from numpy or pandas."""
    name = dotted(node)
    frame = name in ("df", "self.df", "np", "pd") or name.endswith("_df")
    return frame or from_host(notebook, node, site)


@rule(
    "dynamic-padding",
    "warning",
    what="a tokenizer or collator that pads to the longest text of a batch",
    why="every new length needs a new program: one report had 54 minutes of compiling for 34 s of "
    "work (pytorch/xla#2655)",
    fix="use `padding='max_length', max_length=128, truncation=True`, or `pad_to_multiple_of=64` "
    "for only a few lengths",
    backends=TPUS,
)
def _dynamic_padding(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.runs_on_tpu:
        return
    message = "each batch is padded to its own longest text"
    for site in notebook.calls_of("transformers.DataCollatorWithPadding"):
        if not any(word.arg in ("max_length", MULTIPLE) for word in site.call.keywords):
            yield Hit(site, message)
    for name, sites in notebook.called.items():
        if "tokeniz" not in name.lower() and name not in PADDING:
            continue
        for site in sites:
            longest = literal(argument(site.call, "padding")) in (True, "longest")
            # At the top level the whole data set gets one length.
            repeated = site.frame.function is not None or site.loop() is not None
            if longest and repeated and argument(site.call, MULTIPLE) is None:
                yield Hit(site, message)
