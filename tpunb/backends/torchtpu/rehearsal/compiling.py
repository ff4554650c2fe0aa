"""torch.compile with tensors of the device: imported by its first call, as dynamo takes 4 s."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._dynamo import trace_rules
from torch._dynamo.backends.registry import list_backends, lookup_backend, register_backend
from torch.utils import _pytree

_torch: Any = torch


def set_up() -> None:
    """Register the backend `tpu`, once."""
    if "tpu" in list_backends(()):
        return
    register_backend(compile_graph, name="tpu")
    package = __name__.rpartition(".")[0]
    traced = "aliases autocast kernels module patches plans rehearsed_device seeds"
    for name in traced.split():
        trace_rules.add(f"{package}.{name}")  # or dynamo traces the kernels themselves
    _torch._dynamo.config.allow_rnn = True
    inductor: Any = _torch._TorchCompileInductorWrapper
    call = inductor.__call__

    @functools.wraps(call)
    def refuse_tpu(self: Any, graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if _has_tpu(inputs):
            raise RuntimeError(
                "backend='inductor' does not compile for a TPU. Leave `backend` out, or use "
                "backend='tpu'"
            )
        return call(self, graph, inputs, *args, **kwargs)

    inductor.__call__ = refuse_tpu


def _has_tpu(inputs: Any) -> bool:
    leaves = _pytree.tree_leaves(inputs)
    return any(isinstance(x, torch.Tensor) and x.device.type == "tpu" for x in leaves)


def compile_graph(graph: Any, inputs: Any, **options: Any) -> Any:
    """The backend `tpu`: the graph that a TPU would compile, run by the device's kernels."""
    if options:
        names = ", ".join(f"`{name}`" for name in options)
        raise TypeError(f"torch.compile for a TPU does not take {names}: leave it out")
    return lookup_backend("aot_eager")(graph, inputs)


def choose_backend(graph: Any, inputs: Any, **options: Any) -> Any:
    """The backend of a call without `backend`: tpu, or for inputs on the CPU torch's own."""
    if _has_tpu(inputs):
        return compile_graph(graph, inputs, **options)
    has_compiler = _torch._inductor.config.cpp.cxx[0] is not None
    return lookup_backend("inductor" if has_compiler else "aot_eager")(graph, inputs, **options)
