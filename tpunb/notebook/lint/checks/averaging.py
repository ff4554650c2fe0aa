"""Lint rules on gradients: averaged over the ranks, clipped, and used by the optimizer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from tpunb.notebook.lint.checks.sites import for_other_hardware, owner, values_of, words
from tpunb.notebook.lint.index import PACKAGES, NotebookIndex
from tpunb.notebook.lint.rule_table import TPUS, XLA, Hit, Rule, without_xla
from tpunb.notebook.scopes import LOOPS, XM, ParsedCell, Site, argument, dotted, last_part, literal

REDUCTIONS = {
    f"{XM}.reduce_gradients",
    f"{XM}.all_reduce",
    f"{XM}.all_reduce_bucketized_gradients",
    *(f"torch.distributed.{name}" for name in ("all_reduce", "all_reduce_coalesced", "reduce")),
    "torch.distributed.reduce_scatter_tensor",
}
WRAPPERS = {
    *("DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP", "XlaFullySharded"),
    *("XlaFullyShardedDataParallel", "SpmdFullyShardedDataParallel", "FSDPv2", "fully_shard"),
    *("ZeroRedundancyOptimizer", "mark_sharding", "DistributedOptimizer", "parallelize_module"),
}


@Rule(
    "summed-gradients",
    "warning",
    what="gradients that are summed over the cores and not divided by their number",
    why="each step is as many times as long as there are cores: the learning rate that works on "
    "one core diverges (torch_xla 2.9.0 core/xla_model.py: xm.reduce_gradients scales by 1 / world "
    "size, xm.all_reduce does not)",
    fix="write `xm.reduce_gradients(optimizer)`, or `scale=1 / xr.world_size()` in the all-reduce",
    several=True,
    fixes=without_xla(
        "divide them by `dist.get_world_size()` after the all-reduce, or wrap the model in "
        "DistributedDataParallel"
    ),
)
def _summed_gradients(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of(f"{XM}.all_reduce", "torch.distributed.all_reduce"):
        summed = _summed(notebook, site)
        if summed is None or not notebook.in_rank(site):
            continue
        values = values_of(notebook, summed, site)
        nodes = (node for value in values for node in ast.walk(value.node))
        gradients = any(isinstance(n, ast.Attribute) and n.attr == "grad" for n in nodes)
        if gradients and not any(_scales(cell.tree) for cell in _cells_of(notebook, site)):
            yield Hit(site, "the gradients are summed over the cores, not averaged")


def _summed(notebook: NotebookIndex, site: Site) -> ast.expr | None:
    """The argument that an all-reduce sums; None if it does something else, or has a scale."""
    node = site.call
    if notebook.full(node.func, site).startswith("torch_xla"):
        kind = argument(node, "reduce_type", 0)
        sums = literal(kind) == "sum" or (kind is not None and last_part(kind) == "REDUCE_SUM")
        scaled = argument(node, "scale", 2) is not None
        return argument(node, "inputs", 1) if sums and not scaled else None
    kind = argument(node, "op", 1)
    sums = kind is None or last_part(kind) == "SUM"
    return argument(node, "tensor", 0) if sums else None


def _cells_of(notebook: NotebookIndex, site: Site) -> list[ParsedCell]:
    """The cell of a site, and those with the functions of a program that runs it."""
    programs = [program for program in notebook.programs if site in program]
    reached = set[int]().union(*(program.functions for program in programs))
    cells = {f.outer.cell.index for f in notebook.sites.functions if id(f.node) in reached}
    cells |= {program.cell.index for program in programs if program.cell is not None}
    return [cell for cell in notebook.cells if cell.index in {site.cell.index, *cells}]


def _scales(tree: ast.AST) -> bool:
    """Whether code divides or multiplies: it may be by the number of cores."""
    return any(
        (isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult))
        or (isinstance(node, ast.Attribute) and node.attr in ("div", "div_", "mul", "mul_"))
        for node in ast.walk(tree)
    )


def _is_optimizer(notebook: NotebookIndex, name: str, site: Site) -> bool:
    calls = ((v, v.node) for v in (notebook.values(name, site.frame) if name else ()))
    makers = [
        notebook.full(node.func, value) for value, node in calls if isinstance(node, ast.Call)
    ]
    if any("lr_scheduler" in full or "GradScaler" in full for full in makers):
        return False
    last = name.rpartition(".")[2]
    made = any(full.startswith("torch.optim.") for full in makers)
    return made or "optim" in last.lower() or last == "opt"


@Rule(
    "no-gradient-reduction",
    "warning",
    what="`optimizer.step()` on every core, with gradients that are never averaged over the cores",
    why="each core trains a separate model on its part of the data; the model that is saved has "
    "only seen that part (torch_xla 2.9.0 core/xla_model.py: xm.optimizer_step is reduce_gradients "
    "and step)",
    fix="write `xm.optimizer_step(optimizer)`, or wrap the model in DistributedDataParallel",
    several=True,
    fixes=without_xla(
        "wrap the model in DistributedDataParallel, or average the gradients with "
        "`dist.all_reduce` before each step"
    ),
)
def _no_gradient_reduction(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.native or not notebook.loops:
        return
    shared = [
        site
        for site in notebook.sites.calls
        if site.cell.part == "prelude" and site.frame.function is None
    ]
    for program in notebook.programs:
        own = [site for site in notebook.sites.calls if site in program]
        if _reduces(notebook, own, shared):
            continue
        elsewhere = {
            dotted(site.call.args[0])
            for site in own
            if last_part(site.call.func) == "optimizer_step" and site.call.args
        }
        for site in own:
            optimizer, stepped = owner(site), last_part(site.call.func) == "step"
            if not stepped or optimizer in elsewhere or for_other_hardware(site):
                continue
            if site.cell.part != "kernel" and _is_optimizer(notebook, optimizer, site):
                yield Hit(site, "every core steps with its own gradients, which are never averaged")


_SENDS = {f"torch.distributed.{name}" for name in ("send", "isend", "batch_isend_irecv")}
_REDUCER = re.compile(r"(all_?)?reduce|(average|sync|synchronize)_(gradients?|grads?|param\w*)")
"""Names of functions that average gradients, for those that a notebook imports from its files."""


def _reduces(notebook: NotebookIndex, own: Iterable[Site], shared: Iterable[Site]) -> bool:
    """Whether the calls of one program average gradients, or a framework in them does; or each
    rank trains another part of the model, which it sends its results.
    """
    fits = {id(fit.site.node) for fit in notebook.fits}
    for site in own:
        full, name = notebook.full(site.call.func, site), last_part(site.call.func)
        if id(site.node) in fits or name in WRAPPERS or full in _SENDS:
            return True
        if full in REDUCTIONS and not _of_metrics(site.call):
            return True
        if full.partition(".")[0] in PACKAGES and not name.startswith(("seed", "set_seed")):
            return True
        if _REDUCER.match(name.lower()) and not full.startswith("torch"):
            return True
    return any(last_part(site.call.func) in {*WRAPPERS, "Accelerator"} for site in shared)


def _of_metrics(node: ast.Call) -> bool:
    """Whether a reduction is of a loss or another metric, judged by names."""
    names = {word for part in node.args for word in words(part)}
    if any(part in name for name in names for part in ("grad", "param", "weight")):
        return False
    return any(part in name for name in names for part in _METRICS)


_METRICS = ("loss", "acc", "correct", "total", "metric", "count", "seen")


@Rule(
    "clip-before-reduction",
    "warning",
    what="`clip_grad_norm_` before the gradients are averaged over the cores",
    why="each core clips its own gradients, by its own norm: the average is neither the clipped "
    "gradient of the batch nor bounded as on one core (follows from the order; torch_xla 2.9.0 "
    "core/xla_model.py: xm.optimizer_step averages first)",
    fix="write `xm.reduce_gradients(optimizer)`, then clip, then `optimizer.step()`",
    several=True,
    backends=XLA,
)
def _clip_before_reduction(notebook: NotebookIndex) -> Iterator[Hit]:
    averaging = {f"{XM}.optimizer_step", f"{XM}.reduce_gradients"}
    if WRAPPERS & set(notebook.called):
        return  # these average in the backward pass
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        for site in notebook.calls_of(f"torch.nn.utils.{name}", f"torch.nn.utils.clip_grad.{name}"):
            if not notebook.in_rank(site):
                continue
            body = site.loop()
            near = [
                other
                for full in averaging
                for other in notebook.named.get(full, ())
                if other.cell is site.cell
                and other.frame.function is site.frame.function
                and (body is None or body in other.frame.outward())
            ]
            if near and all(other.line > site.line for other in near):
                yield Hit(site, f"`{name}` comes before the gradients are averaged")


@Rule(
    "ddp-arguments",
    "warning",
    what="DistributedDataParallel with `gradient_as_bucket_view=True` on XLA tensors",
    why="in each bucket the gradient that is ready last is not averaged: its weights diverge "
    "between the cores, without an error (measured with torch 2.9.0 and torch_xla 2.9.0; the "
    "program of that gradient contains no all-reduce, on any device)",
    fix="remove the argument, or use `xm.optimizer_step(optimizer)` without "
    "DistributedDataParallel",
    several=True,
    backends=XLA,
)
def _ddp_arguments(notebook: NotebookIndex) -> Iterator[Hit]:
    ddp = ("DistributedDataParallel", "distributed.DistributedDataParallel")
    for site in notebook.calls_of(*(f"torch.nn.parallel.{name}" for name in ddp)):
        view = literal(argument(site.call, "gradient_as_bucket_view")) is True
        if view and notebook.xla and not for_other_hardware(site):
            yield Hit(site, "torch_xla does not average one gradient of each bucket")


@Rule(
    "optimizer-before-device",
    "error",
    what="an optimizer created before its model is moved to the TPU",
    why="the move creates new parameters and the optimizer keeps the old ones: the model is never "
    "trained, without an error (measured with torch_xla 2.9.0, and with TorchTPU's device in torch "
    "2.13: after model.to(device) the optimizer's parameters are on the CPU and are not the "
    "model's)",
    fix="move the model to the device first, then create the optimizer",
    backends=TPUS,
)
def _optimizer_before_device(notebook: NotebookIndex) -> Iterator[Hit]:
    for name, optimizers in notebook.named.items():
        if name.startswith("torch.optim.") and "lr_scheduler" not in name:
            for optimizer in optimizers:
                model = _model_of(optimizer.call)
                if model and _is_moved_later(notebook, model, optimizer):
                    message = f"the optimizer is created before `{model}` is on the device"
                    yield Hit(optimizer, message)


def _model_of(node: ast.Call) -> str:
    """The name of the model in `SGD(model.parameters())`; '' for other calls."""
    given = node.args[0].func if node.args and isinstance(node.args[0], ast.Call) else None
    is_method = isinstance(given, ast.Attribute) and given.attr == "parameters"
    return dotted(given.value) if isinstance(given, ast.Attribute) and is_method else ""


def _is_moved_later(notebook: NotebookIndex, model: str, optimizer: Site) -> bool:
    """Whether a model is moved to the TPU only after its optimizer is created."""
    made = optimizer.place
    moves = [
        site
        for site in notebook.called.get("to", ())
        if (owner(site) == model or model in notebook.names_of(site.node))
        and ("." in model or site.scope.find(model) is optimizer.scope.find(model))
    ]
    late = [
        site
        for site in moves
        if site.place > made
        and owner(site) == model
        and site.frame.function is optimizer.frame.function
        and not any(isinstance(f.node, (*LOOPS, ast.If)) for f in site.frame.outward())
        and site.call.args
        and notebook.is_tpu_device(site.call.args[0], site)
    ]
    early = any(site.place <= made for site in moves)
    again = any(
        value.place > made and not any(value.node is site.node for site in late)
        for value in notebook.values(model, optimizer.frame)
    )
    return bool(late) and not early and not again
