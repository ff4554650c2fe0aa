"""Lint rules on training loops: ends of steps, reads of values, gradients that are not reduced."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from tpunb.notebook.lint.checks.sites import (
    for_other_hardware,
    on_several_cores,
    owner,
    receiver,
    words,
)
from tpunb.notebook.lint.frameworks import PACKAGES
from tpunb.notebook.lint.index import DEVICE_LOADERS, Loop, NotebookIndex
from tpunb.notebook.lint.rules import TPUS, XLA, Hit, rule
from tpunb.notebook.scopes import LOOPS, XM, Site, argument, dotted, last_part

SYNCS = {"torch_xla.sync", f"{XM}.mark_step"}
END_STEPS = (
    *("torch_xla.compile", "torch_xla.step", "torch_xla.experimental.eager_mode"),
    "tpunb.training.Accumulation",
)
"""What ends steps by itself."""
READS = ("item", "tolist", "numpy", "cpu")
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


def _now_and_then(notebook: NotebookIndex, site: Site, loop: Loop | None) -> bool:
    """Whether a site runs in only some steps: under `if step % n == 0`, on one rank, at the end."""
    up_to = loop.frame if loop and loop.frame.function is site.frame.function else None
    for test, _ in site.conditions(up_to):
        if any(isinstance(part, ast.Mod) for part in ast.walk(test)):
            return True
        if words(test) & {"step", "i", "idx", "batch_idx", "it", "log", "verbose", "debug", "item"}:
            return True
        if any("log" in word or "print" in word or "report" in word for word in words(test)):
            return True
        if notebook.depends_on_rank(test, site):
            return True
        if isinstance(test, ast.Name):
            values = notebook.values(test.id, site.frame)
            if any(isinstance(part, ast.Mod) for v in values for part in ast.walk(v.node)):
                return True
    return False


def _is_seldom(notebook: NotebookIndex, site: Site, loop: Loop) -> bool:
    """Whether most steps do not reach a site, also because of `if step % 100: continue`."""
    later = (ast.Lambda, ast.ExceptHandler)
    if any(isinstance(frame.node, later) for frame in site.frame.outward()):
        return True
    return _now_and_then(notebook, site, loop) or (
        site.loop() is loop.frame
        and any(
            isinstance(jump.node, ast.Continue)
            and jump.loop() is loop.frame
            and jump.line < site.line
            and _now_and_then(notebook, jump, loop)
            for jump in notebook.sites.jumps
        )
    )


def _syncs(notebook: NotebookIndex, site: Site) -> bool:
    node = site.call
    full, name = notebook.full(node.func, site), last_part(node.func)
    if name == "optimizer_step":
        return argument(node, "barrier", 1) is not None
    return full in SYNCS or (not full and name in ("mark_step", "sync"))


@rule(
    "no-step-sync",
    "warning",
    what="a training loop without a step boundary: no torch_xla.sync(), no MpDeviceLoader",
    why="operations on XLA tensors are only recorded until torch_xla.sync() ends a step; without "
    "it the graph grows with each batch and takes ever longer to compile, until memory runs out "
    "(torch_xla 2.9.0: distributed/parallel_loader.py calls torch_xla.sync() per batch)",
    fix="call `torch_xla.sync()` at the end of each step, or loop over "
    "`pl.MpDeviceLoader(loader, device)`",
    backends=XLA,
)
def _no_step_sync(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.xla or notebook.managed or not notebook.device_uses:
        return
    if notebook.mentions(*END_STEPS):
        return
    for loop in notebook.loops:
        sites = [*loop.sites, *loop.called]
        if any(_syncs(notebook, site) for site in sites) or _on_other_hardware(loop):
            continue
        reads = (site for site in sites if _is_read(site))
        if _loads_to_device(notebook, loop) or not all(
            _now_and_then(notebook, site, loop) for site in reads
        ):
            continue
        yield Hit((loop.frame.cell, loop.node.lineno), "this loop never ends a step")


def _on_other_hardware(loop: Loop) -> bool:
    function = loop.frame.function
    return function is not None and any("cuda" in name or "gpu" in name for name in function.loads)


def _loads_to_device(notebook: NotebookIndex, loop: Loop) -> bool:
    """Whether the loop may iterate over one of torch_xla's own loaders."""
    if not notebook.device_loader():
        return False
    if isinstance(loop.node, ast.While):
        return True
    names = words(loop.node.iter)
    if names & {name.lower() for name in DEVICE_LOADERS}:
        return True
    known = {id(site.node) for site in notebook.data_loaders}
    for node in ast.walk(loop.node.iter):
        if isinstance(node, ast.Name):
            values = notebook.values(node.id, loop.frame)
            if values and all(id(value.node) in known for value in values):
                return False
    return True


def _is_read(site: Site) -> bool:
    """Whether a call waits for the value of a tensor: `x.item()`."""
    node = site.call
    bare = isinstance(node.func, ast.Attribute) and not node.args and not node.keywords
    return bare and last_part(node.func) in READS


@rule(
    "host-sync-in-step",
    "warning",
    what="`.item()`, `.cpu()`, `print(loss)` or `float(loss)` in every step of a training loop",
    why="each waits until the device has computed everything so far, and the device idles while "
    "Python prepares the next step; torch_xla also splits the step into two graphs (torch_xla's "
    "docs, troubleshooting; aten::_local_scalar_dense in its metrics report)",
    fix="read values every n steps, `if step % 100 == 0:`, or in "
    "`xm.add_step_closure(log, args=(loss,))`; sum up on the device as `total += loss.detach()`",
    backends=TPUS,
    fixes={
        "torchtpu": "read values every n steps, `if step % 100 == 0:`; sum up on the device as "
        "`total += loss.detach()`"
    },
)
def _host_sync_in_step(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.on_device:
        return
    for loop in notebook.loops:
        tensors = _tensors(notebook, loop)
        for site in [*loop.sites, *_called_once(notebook, loop)]:
            if _is_seldom(notebook, site, loop) or for_other_hardware(site):
                continue
            node = site.call
            name, read = last_part(node.func), receiver(site)
            if read is not None and _is_read(site):
                if not from_host(notebook, read, site):
                    yield Hit(site, f"`.{name}()` waits for the device in every step")
            elif notebook.full(node.func, site) == f"{XM}.mesh_reduce":
                yield Hit(site, "`xm.mesh_reduce` waits for the device and all ranks in every step")
            elif name in ("print", "float", "int") and isinstance(node.func, ast.Name):
                shown = [n for part in node.args for n in _plain_uses(part) if n in tensors]
                if shown and site.frame.function is loop.frame.function:
                    yield Hit(site, f"`{name}` of `{shown[0]}` waits for the device in every step")


def _called_once(notebook: NotebookIndex, loop: Loop) -> list[Site]:
    """The calls in the function that contains the step, if the loop only calls that function."""
    functions = [f for site in loop.sites for f in notebook.targets(site)]
    return [
        site
        for function in functions
        if any(last_part(s.call.func) == "backward" for s in function.calls)
        for site in function.calls
        if site.loop() is None
    ]


def _tensors(notebook: NotebookIndex, loop: Loop) -> set[str]:
    """Names that certainly hold device tensors in a loop: those on which `.backward()` is called
    or that are passed to `accelerator.backward(loss)`.
    """
    tensors = set()
    given = {id(fit.site.node) for fit in notebook.backward_by_accelerate}
    for site in loop.sites:
        if id(site.node) in given:
            tensors |= {dotted(part) for part in site.call.args[:1]}
        elif last_part(site.call.func) == "backward":
            tensors.add(owner(site))
    return tensors - {""}


def _plain_uses(node: ast.expr) -> Iterator[str]:
    """Yield names whose own value is shown: `loss`, `loss / n`, `f'{loss}'`, `'%f' % loss`; not
    `loss.item()` and not `f(loss)`.
    """
    todo: list[ast.AST] = [node]
    while todo:
        part = todo.pop()
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Call):
            if isinstance(part.func, ast.Attribute) and part.func.attr in ("format", "detach"):
                todo += [*part.args, *(word.value for word in part.keywords)]
                if part.func.attr == "detach":
                    todo.append(part.func.value)
        elif isinstance(part, ast.JoinedStr | ast.FormattedValue | ast.BinOp | ast.Tuple):
            todo += ast.iter_child_nodes(part)


def from_host(
    notebook: NotebookIndex, node: ast.expr, site: Site, above: frozenset[int] = frozenset()
) -> bool:
    """Whether a value is known not to be a device tensor: from numpy, or already read.

    `above`: the ids of the values that this one is a part of: `x = x.to(device)`.
    """
    if isinstance(node, ast.Call):
        if last_part(node.func) in READS:
            return True
        full = notebook.full(node.func, site)
        if full.startswith(("numpy.", "sklearn.", "scipy.", "pandas.", f"{XM}.mesh_reduce")):
            return True
        if any(_is_read(s) for one in notebook.targets(Site(node, site.frame)) for s in one.calls):
            return True
        if isinstance(node.func, ast.Attribute):
            return from_host(notebook, node.func.value, site, above)
    if isinstance(node, ast.Attribute | ast.Subscript):
        return from_host(notebook, node.value, site, above)
    if isinstance(node, ast.Name):
        values = notebook.values(node.id, site.frame)
        return bool(values) and all(
            isinstance(v.node, ast.Call)
            and id(v.node) not in above
            and from_host(notebook, v.node, v, above | {id(v.node)})
            for v in values
        )
    return False


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


@rule(
    "no-gradient-reduction",
    "warning",
    what="`optimizer.step()` on every core, with gradients that are never averaged over the cores",
    why="each core trains a separate model on its part of the data; the model that is saved has "
    "only seen that part (torch_xla 2.9.0 core/xla_model.py: xm.optimizer_step is reduce_gradients "
    "and step)",
    fix="write `xm.optimizer_step(optimizer)`, or wrap the model in DistributedDataParallel",
    fixes=dict.fromkeys(
        ("torchtpu", "torch"),
        "wrap the model in DistributedDataParallel, or average the gradients with "
        "`dist.all_reduce` before each step",
    ),
)
def _no_gradient_reduction(notebook: NotebookIndex) -> Iterator[Hit]:
    if notebook.spmd or not notebook.native or not notebook.loops:
        return
    shared = [
        site
        for site in notebook.sites.calls
        if site.cell.part == "prelude" and site.frame.function is None
    ]
    for program in notebook.programs:
        own = [site for site in notebook.sites.calls if site in program]
        if program.alone or _reduces(notebook, own, shared):
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


_REDUCER = re.compile(r"(all_?)?reduce|(average|sync|synchronize)_(gradients?|grads?|param\w*)")
"""Names of functions that average gradients, for those that a notebook imports from its files."""


def _reduces(notebook: NotebookIndex, own: Iterable[Site], shared: Iterable[Site]) -> bool:
    """Whether the calls of one program average gradients, or a framework in them does."""
    fits = {id(fit.site.node) for fit in (*notebook.fits, *notebook.backward_by_accelerate)}
    for site in own:
        full, name = notebook.full(site.call.func, site), last_part(site.call.func)
        if id(site.node) in fits or name in WRAPPERS:
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


@rule(
    "clip-before-reduction",
    "warning",
    what="`clip_grad_norm_` before the gradients are averaged over the cores",
    why="each core clips its own gradients, by its own norm: the average is neither the clipped "
    "gradient of the batch nor bounded as on one core (follows from the order; torch_xla 2.9.0 "
    "core/xla_model.py: xm.optimizer_step averages first)",
    fix="write `xm.reduce_gradients(optimizer)`, then clip, then `optimizer.step()`",
    backends=XLA,
)
def _clip_before_reduction(notebook: NotebookIndex) -> Iterator[Hit]:
    averaging = {f"{XM}.optimizer_step", f"{XM}.reduce_gradients"}
    if WRAPPERS & set(notebook.called):
        return  # these average in the backward pass
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        for site in notebook.calls_of(f"torch.nn.utils.{name}", f"torch.nn.utils.clip_grad.{name}"):
            if not on_several_cores(notebook, site):
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


@rule(
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
