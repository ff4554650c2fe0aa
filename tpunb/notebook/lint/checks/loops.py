"""Lint rules on training loops: ends of steps, reads of values, shapes that change."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpunb.notebook.lint.checks.sites import for_other_hardware, owner, receiver, words
from tpunb.notebook.lint.index import Loop, NotebookIndex
from tpunb.notebook.lint.rule_table import TPUS, XLA, Hit, Rule
from tpunb.notebook.scopes import XM, DefinedFunction, Site, argument, dotted, last_part

SYNCS = {"torch_xla.sync", f"{XM}.mark_step"}
END_STEPS = {
    **{"torch_xla.compile": "compile", "torch_xla.step": "step"},
    "torch_xla.experimental.eager_mode": "eager_mode",
    "tpunb.training.Accumulation": "Accumulation",
}
"""What ends steps by itself."""
DEVICE_LOADERS = {"MpDeviceLoader", "ParallelLoader", "per_device_loader"}
READS = ("item", "tolist", "numpy", "cpu")


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


@Rule(
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
    if not notebook.xla or notebook.managed or not notebook.uses_device:
        return
    names = (notebook.full(s.node, s) for s in notebook.sites.attributes(*END_STEPS.values()))
    if END_STEPS.keys() & {*notebook.named, *names}:
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
    if not DEVICE_LOADERS & notebook.called.keys():
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


@Rule(
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
        tensors = _tensors(loop)
        for site in [*loop.sites, *_called_once(notebook, loop)]:
            if _is_seldom(notebook, site, loop) or for_other_hardware(site):
                continue
            node = site.call
            name, read = last_part(node.func), receiver(site)
            if read is not None and _is_read(site):
                if not _from_host(notebook, read, site):
                    yield Hit(site, f"`.{name}()` waits for the device in every step")
            elif notebook.full(node.func, site) == f"{XM}.mesh_reduce":
                yield Hit(site, "`xm.mesh_reduce` waits for the device in every step")
            elif name in ("print", "float", "int") and isinstance(node.func, ast.Name):
                shown = [n for part in node.args for n in _plain_uses(part) if n in tensors]
                if shown and site.frame.function is loop.frame.function:
                    yield Hit(site, f"`{name}` of `{shown[0]}` waits for the device in every step")


def _called_once(notebook: NotebookIndex, loop: Loop) -> list[Site]:
    """The calls in the function that contains the step, if the loop only calls that function."""
    functions = [f for site in loop.sites for f in notebook.sites.targets(site.call)]
    return [
        site
        for function in functions
        if any(last_part(s.call.func) == "backward" for s in function.calls)
        for site in function.calls
        if site.loop() is None
    ]


def _tensors(loop: Loop) -> set[str]:
    """Names that certainly hold device tensors in a loop: those on which `.backward()` is called
    or that are passed to `accelerator.backward(loss)`.
    """
    backward = [site for site in loop.sites if last_part(site.call.func) == "backward"]
    passed = {dotted(part) for site in backward for part in site.call.args[:1]}
    return (passed | {owner(site) for site in backward}) - {""}


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


def _from_host(
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
        if any(_is_read(s) for one in notebook.sites.targets(node) for s in one.calls):
            return True
        if isinstance(node.func, ast.Attribute):
            return _from_host(notebook, node.func.value, site, above)
    if isinstance(node, ast.Attribute | ast.Subscript):
        return _from_host(notebook, node.value, site, above)
    if isinstance(node, ast.Name):
        values = notebook.values(node.id, site.frame)
        return bool(values) and all(
            isinstance(v.node, ast.Call)
            and id(v.node) not in above
            and _from_host(notebook, v.node, v, above | {id(v.node)})
            for v in values
        )
    return False


METHODS = ("nonzero", "masked_select", "unique", "unique_consecutive")
FUNCTIONS = [f"torch.{name}" for name in METHODS]


@Rule(
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
    return frame or _from_host(notebook, node, site)
