"""Lint rules on code that is written for GPUs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpunb.notebook.lint.checks.sites import (
    asks_hardware,
    for_other_hardware,
    has_spread,
    pins_older,
    receiver,
)
from tpunb.notebook.lint.findings import Severity
from tpunb.notebook.lint.frameworks import is_training_arguments
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.rules import TPUS, XLA, Hit, rule
from tpunb.notebook.scopes import Site, argument, dotted, last_part, literal

FAILS = [
    f"torch.cuda.{name}"
    for name in (
        *("synchronize", "set_device", "get_device_name", "current_device", "mem_get_info"),
        *("get_device_properties", "get_device_capability", "current_stream", "FloatTensor"),
        *("HalfTensor", "LongTensor", "ByteTensor", "BoolTensor", "IntTensor", "Stream"),
    )
]
"""Functions and classes of torch.cuda that raise on a machine without a GPU (torch 2.9)."""


def _is_cuda(notebook: NotebookIndex, node: ast.expr | None, site: Site) -> bool:
    """Whether an expression is 'cuda' or torch.device('cuda'), and never anything else."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.partition(":")[0] == "cuda"
    if isinstance(node, ast.Call):
        return notebook.full(node.func, site) == "torch.device" and any(
            _is_cuda(notebook, part, site) for part in node.args[:1]
        )
    if isinstance(node, ast.Name):
        values = notebook.values(node.id, site.frame)
        return bool(values) and all(
            isinstance(v.node, ast.Constant | ast.Call)
            and _is_cuda(notebook, v.node, v)
            and not for_other_hardware(v)
            for v in values
        )
    return False


@rule(
    "cuda-call",
    "error",
    what="`.cuda()`, `.to('cuda')`, calls of torch.cuda that need a GPU, and the backend nccl",
    why="there is no GPU on a TPU machine: RuntimeError, AssertionError or ValueError (each was "
    "called with torch 2.9.0 on a machine without a GPU)",
    fix="write `.to(device)` with `device = torch_xla.device()`",
    backends=TPUS,
    fixes={"torchtpu": "write `.to('tpu')`"},
)
def _cuda_call(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.called.get("cuda", ()):
        node = site.call
        is_method = receiver(site) is not None and not notebook.full(node.func, site)
        if is_method and len(node.args) <= 1 and not notebook.functions.get("cuda"):
            yield from _moved(notebook, site, "`.cuda()` needs a GPU")
    for site in notebook.called.get("to", ()):
        target = argument(site.call, "device", 0)
        if receiver(site) is not None and _is_cuda(notebook, target, site):
            yield from _moved(notebook, site, "`.to('cuda')` needs a GPU")
    for site in notebook.calls_of(*FAILS):
        yield from _cuda_hit(site, f"`{notebook.full(site.call.func, site)}` needs a GPU")
    for name, sites in notebook.named.items():
        for site in sites if name.startswith("torch.") else ():
            if _is_cuda(notebook, argument(site.call, "device"), site):
                yield from _cuda_hit(site, "`device='cuda'` needs a GPU")
    for site in notebook.calls_of("torch.distributed.init_process_group"):
        if literal(argument(site.call, "backend", 0)) == "nccl":
            fix = "write `init_process_group('xla', init_method='xla://')`, and import "
            fix += "torch_xla.distributed.xla_backend"
            if notebook.backend == "torchtpu":
                fix = "write `init_process_group('tpu_dist')`"
            yield from _cuda_hit(site, "the backend nccl needs a GPU", fix)


def _moved(notebook: NotebookIndex, site: Site, message: str) -> Iterator[Hit]:
    """Yield the hit of a call that moves an object to the GPU, unless it has nothing to move."""
    moved = receiver(site)
    assert moved is not None
    empty = _has_no_tensors(notebook, moved, site)
    if empty is not True:
        yield from _cuda_hit(site, message, certain=empty is False, of_object=True)


_WITHOUT_TENSORS = re.compile(
    r"\w*Loss|\w*(LU|Sigmoid|Softmax|Softmin|Softplus|Softsign|Tanh|Shrink|Pool[123]d|Pad[123]d)"
    r"|\w*Dropout\w*|Flatten|Unflatten|Identity|Upsample|UpsamplingNearest2d|PixelShuffle|Threshold"
)
"""Modules of torch.nn without parameters and buffers: `.cuda()` succeeds, and changes nothing."""
_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict", "Module", "ParameterList", "PReLU")
_MAY_BE_EMPTY = re.compile(r"loss|crit|metric|act(ivation)?(_|$)|fn$|func|objective", re.I)
"""Names of objects that may be such modules."""


def _has_no_tensors(
    notebook: NotebookIndex, node: ast.expr, site: Site, depth: int = 0
) -> bool | None:
    """Whether an object has nothing to move, as `nn.MSELoss()`; None if that is not known."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if notebook.full(node.func, site):
            break
        node = node.func.value  # of `nn.Linear(2, 2).train()`
    if isinstance(node, ast.Call):
        full, name = notebook.full(node.func, site), last_part(node.func)
        if full.startswith("torch.nn.") and not full.startswith("torch.nn.functional."):
            if _WITHOUT_TENSORS.fullmatch(name) and name != "PReLU":
                given = (argument(node, "weight", 0), argument(node, "pos_weight"))
                return True if not any(given) else None
            if name not in _CONTAINERS:
                return False
            parts = [_has_no_tensors(notebook, part, site, depth) for part in node.args]
            return False if False in parts else None
        return None if _MAY_BE_EMPTY.search(name) or not name else False
    name = dotted(node)
    values = notebook.values(name, site.frame) if name and depth < 3 else []
    known = {
        _has_no_tensors(notebook, value.node, value, depth + 1)
        for value in values
        if isinstance(value.node, ast.Call) and not _moves(value.node, name)
    }
    if len(known) == 1:
        return known.pop()
    return None if known or not name or _MAY_BE_EMPTY.search(name) else False


def _moves(node: ast.Call, name: str) -> bool:
    """Whether a call is a method of the object itself: the value of `x = x.cuda()`."""
    return isinstance(node.func, ast.Attribute) and dotted(node.func.value) == name


def _cuda_hit(
    site: Site,
    message: str,
    fix: str | None = None,
    *,
    certain: bool = True,
    of_object: bool = False,
) -> Iterator[Hit]:
    if for_other_hardware(site):
        return
    frames = list(site.frame.outward())
    if any(isinstance(frame.node, ast.Try) and frame.part == "body" for frame in frames):
        return
    severity: Severity | None = "warning" if any(True for _ in site.conditions()) else None
    yield Hit(site, message, fix, severity=severity, certain=certain, of_object=of_object)


@rule(
    "cuda-amp",
    "warning",
    what="torch.cuda.amp, or autocast and GradScaler for 'cuda'",
    why="autocast for cuda leaves operations on XLA tensors in float32, and raises RuntimeError "
    "with dtype=torch.bfloat16; bfloat16 needs no GradScaler (measured with torch 2.9.0 and "
    "torch_xla 2.9.0)",
    fix="write `with torch.autocast('xla', dtype=torch.bfloat16):`, and remove the scaler",
    backends=TPUS,
    fixes={
        "torchtpu": "write `with torch.autocast('tpu', dtype=torch.bfloat16):`, and remove the "
        "scaler"
    },
)
def _cuda_amp(notebook: NotebookIndex) -> Iterator[Hit]:
    tensors = "XLA" if notebook.backend == "xla" else "TPU"
    for name, sites in notebook.named.items() if notebook.runs_on_tpu else ():
        short = name.rpartition(".")[2]
        if short not in ("autocast", "GradScaler") or not name.startswith("torch."):
            continue
        for site in sites:
            node = site.call
            kind = argument(node, "device_type" if short == "autocast" else "device", 0)
            cuda = name.startswith("torch.cuda.amp") or literal(kind) == "cuda"
            enabled = argument(node, "enabled", 0 if name.endswith("amp.autocast") else None)
            if not cuda or _may_be_off(notebook, enabled, site) or for_other_hardware(site):
                continue
            dtype = argument(node, "dtype")
            if short == "GradScaler":
                yield Hit(site, f"a GradScaler has no use with {tensors} tensors")
            elif dtype is not None and notebook.full(dtype, site) == "torch.bfloat16":
                message = "autocast to bfloat16 for cuda raises RuntimeError"
                yield Hit(site, message, severity="error")
            else:
                yield Hit(site, f"autocast for cuda has no effect on {tensors} tensors")


def _may_be_off(notebook: NotebookIndex, enabled: ast.expr | None, site: Site) -> bool:
    """Whether `enabled=` is False, or depends on the hardware: `torch.cuda.is_available()`."""
    if enabled is None:
        return False
    values = [v.node for v in notebook.values(dotted(enabled), site.frame)] or [enabled]
    return any(literal(value) is False or asks_hardware(value) for value in values)


_PRECISION = {
    "Accelerator": "mixed_precision",
    "notebook_launcher": "mixed_precision",
    "Trainer": "precision",
}
_FLOAT16 = ("fp16", "16-mixed", "16-true", "16", 16)


@rule(
    "fp16",
    "warning",
    what="float16 mixed precision of accelerate, Lightning or transformers",
    why="a TPU computes in bfloat16, without a GradScaler; accelerate raises ValueError on a TPU "
    "(read in accelerate 1.15 accelerator.py; not measured on a TPU)",
    fix="use bf16, or 'bf16-true' with Lightning",
    backends=TPUS,
)
def _fp16(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.runs_on_tpu:
        return
    words = _PRECISION | {n: "fp16" for n in notebook.called if is_training_arguments(n)}
    for name, word in words.items():
        for site in notebook.called.get(name, ()):
            value = literal(argument(site.call, word))
            if value in _FLOAT16 or (word == "fp16" and value is True):
                yield Hit(site, f"{word}={value!r} only works on GPUs")


@rule(
    "fused-optimizer",
    "error",
    what="an optimizer with `fused=True` on XLA tensors; transformers' Trainer uses one by default",
    why="RuntimeError: `fused=True` requires all the params to be floating point Tensors of "
    "supported devices (measured with torch 2.9.0 and torch_xla 2.9.0; read in transformers 5.24 "
    "training_args.py)",
    fix="remove `fused`; write `optim='adamw_torch'` in the arguments of a Trainer",
    backends=XLA,
)
def _fused_optimizer(notebook: NotebookIndex) -> Iterator[Hit]:
    yield from _fused_by_trainer(notebook)
    for name, sites in notebook.named.items() if notebook.xla else ():
        for site in sites if name.startswith("torch.optim.") else ():
            fused = literal(argument(site.call, "fused")) is True
            if fused and not for_other_hardware(site):
                yield Hit(site, "a fused optimizer cannot step on XLA tensors")


def _fused_by_trainer(notebook: NotebookIndex) -> Iterator[Hit]:
    trains = any(fit.framework.name == "transformers" for fit in notebook.fits)
    if not notebook.runs_on_tpu or not trains or pins_older(notebook, "transformers", (5, 0)):
        return
    for name in filter(is_training_arguments, notebook.called):
        for site in notebook.called[name]:
            node = site.call
            given = argument(node, "optim")
            package = notebook.full(node.func, site).partition(".")[0]
            known = package in ("transformers", "trl") and not has_spread(node)
            fused = given is None or literal(given) == "adamw_torch_fused"
            if known and fused and not for_other_hardware(site):
                default = "by default " if given is None else ""
                message = f"{default}the Trainer's AdamW is fused, which cannot step on XLA tensors"
                yield Hit(site, message, "write `optim='adamw_torch'`")


@rule(
    "ddp-arguments",
    "warning",
    what="DistributedDataParallel with `gradient_as_bucket_view=True`, or with `device_ids` of the "
    "rank, on XLA tensors",
    why="with the first, in each bucket the gradient that is ready last is not averaged: its "
    "weights diverge between the cores, without an error. A rank has one XLA device, number 0: any "
    "other fails in the forward pass with TypeError (measured with torch 2.9.0 and torch_xla "
    "2.9.0; the program of that gradient contains no all-reduce, on any device)",
    fix="remove the argument, or use `xm.optimizer_step(optimizer)` without "
    "DistributedDataParallel",
    backends=XLA,
)
def _ddp_arguments(notebook: NotebookIndex) -> Iterator[Hit]:
    ddp = ("DistributedDataParallel", "distributed.DistributedDataParallel")
    for site in notebook.calls_of(*(f"torch.nn.parallel.{name}" for name in ddp)):
        if not notebook.xla or for_other_hardware(site):
            continue
        if literal(argument(site.call, "gradient_as_bucket_view")) is True:
            yield Hit(site, "torch_xla does not average one gradient of each bucket")
        ids = argument(site.call, "device_ids", 1)
        if isinstance(ids, ast.List) and any(
            isinstance(part, ast.Constant | ast.Name)
            and literal(part) != 0
            and not notebook.is_tpu_device(part, site)
            for part in ids.elts
        ):
            yield Hit(site, "`device_ids` numbers GPUs", severity="error")


@rule(
    "data-parallel",
    "warning",
    what="torch.nn.DataParallel",
    why="without GPUs it just calls the model, on one core (measured with torch 2.9.0: its "
    "device_ids are empty)",
    fix="remove it: under %%tpu_train every core has its own copy of the model, and "
    "`xm.optimizer_step(optimizer)` averages the gradients",
    backends=TPUS,
    fixes={
        "torchtpu": "remove it: under %%tpu_train every core has its own copy of the model, and "
        "DistributedDataParallel averages the gradients"
    },
)
def _data_parallel(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"):
        if notebook.runs_on_tpu and not for_other_hardware(site):
            yield Hit(site, "DataParallel does nothing without GPUs")


@rule(
    "compile-backend",
    "error",
    what="torch.compile without backend='openxla' in a notebook that uses an XLA device",
    why="its default backend has no code generator for XLA: InductorError: KeyError: 'xla' "
    "(measured with torch 2.9.0 and torch_xla 2.9.0)",
    fix="write `torch.compile(model, backend='openxla')`",
    backends=XLA,
)
def _compile_backend(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of("torch.compile") if notebook.device_uses else ():
        backend = argument(site.call, "backend")
        on_device = notebook.in_rank(site) == (notebook.multi or notebook.spmd)
        default = backend is None and not has_spread(site.call)
        if literal(backend) == "inductor":
            yield Hit(site, "the backend inductor fails on XLA tensors")
        elif default and on_device and not for_other_hardware(site):
            yield Hit(site, "torch.compile without a backend fails on XLA tensors")


@rule(
    "torch-checkpoint",
    "error",
    what="torch.utils.checkpoint, or transformers' gradient checkpointing, on an XLA device",
    why="AttributeError: module 'torch' has no attribute 'xla' (measured with torch 2.9.0, "
    "torch_xla 2.9.0 and transformers 5.23)",
    fix="use `from torch_xla.utils.checkpoint import checkpoint` with `use_reentrant=True`; for a "
    "library's model, wrap its layers in `torch_xla.distributed.fsdp.checkpoint_module`",
    backends=XLA,
)
def _torch_checkpoint(notebook: NotebookIndex) -> Iterator[Hit]:
    for site, what, fix in _checkpointing(notebook):
        if not for_other_hardware(site):
            yield Hit(site, f"{what}, which fails on XLA tensors", fix)


def _checkpointing(notebook: NotebookIndex) -> Iterator[tuple[Site, str, str | None]]:
    """Yield each use of torch's checkpointing with what it is, and a fix."""
    for name in filter(is_training_arguments, notebook.called if notebook.runs_on_tpu else ()):
        for site in notebook.called[name]:
            if literal(argument(site.call, "gradient_checkpointing")) is True:
                what = "`gradient_checkpointing=True` uses torch.utils.checkpoint"
                yield site, what, "remove it"
    if not notebook.device_uses:
        return
    for name in ("checkpoint", "checkpoint_sequential"):
        for site in notebook.calls_of(f"torch.utils.checkpoint.{name}"):
            if notebook.sites.is_certain(site.call.func, site.scope):
                yield site, f"this is `{name}` of torch.utils.checkpoint", None
    if notebook.imports("transformers"):
        for name in ("gradient_checkpointing_enable", "activation_checkpointing_enable"):
            for site in notebook.called.get(name, ()):
                yield site, f"`{name}` uses torch.utils.checkpoint", None
