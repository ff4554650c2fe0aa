"""Lint rules on code that needs an NVIDIA GPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.names import (
    argument,
    asks_hardware,
    call,
    dotted,
    for_other_hardware,
    literal,
)
from tpunb.notebook.lint.rules import Hit, rule
from tpunb.notebook.lint.walk import Site

FAILS = {
    f"torch.cuda.{name}"
    for name in (
        *("synchronize", "set_device", "get_device_name", "current_device", "mem_get_info"),
        *("get_device_properties", "get_device_capability", "current_stream", "FloatTensor"),
        *("HalfTensor", "LongTensor", "ByteTensor", "BoolTensor", "IntTensor", "Stream"),
    )
}
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
    what="`.cuda()`, `.to('cuda')` and calls of torch.cuda that need a GPU",
    fact="there is no GPU on a TPU machine: RuntimeError or AssertionError",
    source="each was called with torch 2.9.0 on a machine without a GPU",
    fix="write `.to(device)` with `device = torch_xla.device()`; check `torch.cuda.is_available()` "
    "before code that needs a GPU",
)
def _cuda_call(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.called.get("cuda", ()):
        node = call(site)
        is_method = isinstance(node.func, ast.Attribute) and not notebook.full(node.func, site)
        if is_method and len(node.args) <= 1 and not notebook.functions.get("cuda"):
            yield from _cuda_hit(site, "`.cuda()` needs a GPU")
    for site in notebook.calls_of(*sorted(FAILS)):
        name = notebook.full(call(site).func, site)
        yield from _cuda_hit(site, f"`{name}` needs a GPU")
    for site in notebook.called.get("to", ()):
        if isinstance(call(site).func, ast.Attribute):
            target = argument(call(site), "device", 0)
            if _is_cuda(notebook, target, site):
                yield from _cuda_hit(site, "`.to('cuda')` needs a GPU")
    for name, sites in notebook.named.items():
        for site in sites if name.startswith("torch.") else ():
            if _is_cuda(notebook, argument(call(site), "device"), site):
                yield from _cuda_hit(site, "`device='cuda'` needs a GPU")


def _cuda_hit(site: Site, message: str) -> Iterator[Hit]:
    if for_other_hardware(site):
        return
    frames = list(site.frame.outward())
    if any(isinstance(frame.node, ast.Try) and frame.part == "body" for frame in frames):
        return
    conditional = any(True for _ in site.conditions())
    yield Hit(site, message, severity="warning" if conditional else None)


@rule(
    "cuda-amp",
    "warning",
    what="torch.cuda.amp, or autocast and GradScaler for 'cuda'",
    fact="autocast for cuda leaves operations on XLA tensors in float32, and raises RuntimeError "
    "with dtype=torch.bfloat16; bfloat16 needs no GradScaler",
    source="measured with torch 2.9.0 and torch_xla 2.9.0",
    fix="write `with torch.autocast('xla', dtype=torch.bfloat16):`, and remove the scaler",
)
def _cuda_amp(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.runs_on_tpu:
        return
    for name, sites in notebook.named.items():
        short = name.rpartition(".")[2]
        if short not in ("autocast", "GradScaler") or not name.startswith("torch."):
            continue
        for site in sites:
            node = call(site)
            kind = argument(node, "device_type" if short == "autocast" else "device", 0)
            cuda = name.startswith("torch.cuda.amp") or literal(kind) == "cuda"
            enabled = argument(node, "enabled", 0 if name.endswith("amp.autocast") else None)
            if not cuda or _may_be_off(notebook, enabled, site) or for_other_hardware(site):
                continue
            dtype = argument(node, "dtype")
            if short == "GradScaler":
                yield Hit(site, "a GradScaler has no use with XLA tensors")
            elif dtype is not None and notebook.full(dtype, site) == "torch.bfloat16":
                yield Hit(
                    site, "autocast to bfloat16 for cuda raises RuntimeError", severity="error"
                )
            else:
                yield Hit(site, "autocast for cuda has no effect on XLA tensors")


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
    "TrainingArguments": "fp16",
}
_FLOAT16 = ("fp16", "16-mixed", "16-true", "16", 16)


@rule(
    "fp16",
    "warning",
    what="float16 mixed precision of accelerate, Lightning or transformers",
    fact="a TPU computes in bfloat16, without a GradScaler; accelerate raises ValueError on a TPU",
    source="read in accelerate 1.15 accelerator.py; not measured on a TPU",
    fix="use bf16, or 'bf16-true' with Lightning",
)
def _fp16(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.runs_on_tpu:
        return
    for name, word in _PRECISION.items():
        for site in notebook.called.get(name, ()):
            value = literal(argument(call(site), word))
            if value in _FLOAT16 or (word == "fp16" and value is True):
                yield Hit(site, f"{word}={value!r} only works on GPUs")


@rule(
    "nccl",
    "error",
    what="a process group with the backend nccl",
    fact="ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
    source="measured with torch 2.9.0",
    fix="import torch_xla.distributed.xla_backend, and write "
    "`dist.init_process_group('xla', init_method='xla://')`",
)
def _nccl(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of("torch.distributed.init_process_group"):
        backend = argument(call(site), "backend", 0)
        if literal(backend) == "nccl" and not for_other_hardware(site):
            yield Hit(site, "the backend nccl only works with GPUs")


@rule(
    "fused-optimizer",
    "error",
    what="an optimizer with `fused=True` on XLA tensors",
    fact="RuntimeError: `fused=True` requires all the params to be floating point Tensors of "
    "supported devices",
    source="measured with torch 2.9.0 and torch_xla 2.9.0",
    fix="remove `fused`",
)
def _fused_optimizer(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.xla:
        return
    for name, sites in notebook.named.items():
        for site in sites if name.startswith("torch.optim.") else ():
            fused = literal(argument(call(site), "fused")) is True
            if fused and not for_other_hardware(site):
                yield Hit(site, "a fused optimizer cannot step on XLA tensors")


DDP = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
)


@rule(
    "ddp-device-ids",
    "error",
    what="DistributedDataParallel with `device_ids` of the rank",
    fact="a rank has one XLA device, number 0: any other number fails in the forward pass",
    source="measured with torch 2.9.0 and torch_xla 2.9.0: [0] and None work, [1] raises TypeError",
    fix="remove `device_ids` and `output_device`",
)
def _ddp_device_ids(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.xla:
        return
    for site in notebook.calls_of(*DDP):
        value = argument(call(site), "device_ids", 1)
        if not isinstance(value, ast.List) or for_other_hardware(site):
            continue
        for part in value.elts:
            if isinstance(part, ast.Constant) and part.value == 0:
                continue
            if isinstance(part, ast.Constant | ast.Name) and not notebook.is_xla_device(part, site):
                yield Hit(site, "`device_ids` numbers GPUs")
                break


@rule(
    "ddp-bucket-view",
    "warning",
    what="DistributedDataParallel with `gradient_as_bucket_view=True` on XLA tensors",
    fact="in each bucket the gradient that is ready last is not averaged: its weights diverge "
    "between the cores, without an error",
    source="torch_xla 2.8.0 and 2.9.0: the program of that gradient contains no all-reduce, on any "
    "device",
    fix="remove it, or use `xm.optimizer_step(optimizer)` without DistributedDataParallel",
)
def _ddp_bucket_view(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.xla:
        return
    for site in notebook.calls_of(*DDP):
        view = literal(argument(call(site), "gradient_as_bucket_view"))
        if view is True and not for_other_hardware(site):
            yield Hit(site, "torch_xla does not average one gradient of each bucket")


@rule(
    "data-parallel",
    "warning",
    what="torch.nn.DataParallel",
    fact="without GPUs it just calls the model, on one core",
    source="measured with torch 2.9.0: its device_ids are empty",
    fix="remove it: under %%tpu_train every core has its own copy of the model, and "
    "`xm.optimizer_step(optimizer)` averages the gradients",
)
def _data_parallel(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.runs_on_tpu:
        return
    for site in notebook.calls_of("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"):
        if not for_other_hardware(site):
            yield Hit(site, "DataParallel does nothing without GPUs")


@rule(
    "compile-backend",
    "error",
    what="torch.compile without backend='openxla' in a notebook that uses an XLA device",
    fact="its default backend has no code generator for XLA: InductorError: KeyError: 'xla'",
    source="measured with torch 2.9.0 and torch_xla 2.9.0",
    fix="write `torch.compile(model, backend='openxla')`",
)
def _compile_backend(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.device_uses:
        return
    for site in notebook.calls_of("torch.compile"):
        backend = argument(call(site), "backend")
        if backend is None and not any(word.arg is None for word in call(site).keywords):
            if not for_other_hardware(site) and notebook.in_rank(site) == (
                notebook.multi or notebook.spmd
            ):
                yield Hit(site, "torch.compile without a backend fails on XLA tensors")
        elif isinstance(backend, ast.Constant) and backend.value == "inductor":
            yield Hit(site, "the backend inductor fails on XLA tensors")
