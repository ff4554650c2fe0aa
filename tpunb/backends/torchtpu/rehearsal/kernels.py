"""The device's kernels: what only touches metadata, what makes memory, what torch lacks."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from tpunb.backends.torchtpu.rehearsal import seeds
from tpunb.backends.torchtpu.rehearsal.aliases import bare_cpu, bare_tpu, to_cpu, to_tpu
from tpunb.backends.torchtpu.rehearsal.plans import (
    KEY,
    Kernel,
    check_device,
    cpu_kernel,
    make_kernel,
    not_dense,
    swap,
)

_C: Any = torch._C
_aten: Any = torch.ops.aten
_Memory = torch.memory_format | None
_Shape = list[int]

METADATA_ONLY = (
    "as_strided view _reshape_alias unfold view_as_real view_as_complex "
    "set_.source_Storage set_.source_Storage_storage_offset"
).split()
"""The CPU's kernels of these read and write no values: they run on the device's tensors."""
CPU_INDICES = {"index.Tensor": 1, "index_put_": 1, "_index_put_impl_": 1}
"""Operations whose indices may be on the CPU, as on CUDA, and where they are."""
COMPOSITE = "convolution convolution_backward mode.values conj_physical_ conj_physical.out".split()
"""Operations that torch takes apart, or refuses, for a device that it does not know."""
NOT_DENSE = {
    "SparsePrivateUse1": "sparse",
    "SparseCsrPrivateUse1": "sparse",
    "QuantizedPrivateUse1": "quantized",
    "NestedTensorPrivateUse1": "nested",
}
"""Dispatch keys of the device's tensors of other layouts, which it has not."""

_empty_cpu = cpu_kernel(_aten.empty.memory_format)
_empty_strided_cpu = cpu_kernel(_aten.empty_strided.default)
_copy_cpu = cpu_kernel(_aten.copy_.default)
_to_copy_cpu = cpu_kernel(_aten._to_copy.default)
_resize_cpu = cpu_kernel(_aten.resize_.default)
_choose_attention_cpu = cpu_kernel(_aten._fused_sdp_choice.default)
_overlapping = make_kernel(_aten.copy_.default)


def find_op(name: str) -> Any:
    """The operation `aten::name`, with or without the name of an overload."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet), overload or "default")


def empty(
    size: _Shape,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: _Memory = None,
) -> Any:
    check_device(device)
    return bare_tpu(_empty_cpu(size, dtype=dtype, memory_format=memory_format))


def empty_strided(
    size: _Shape,
    stride: _Shape,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    check_device(device)
    return bare_tpu(_empty_strided_cpu(size, stride, dtype=dtype))


def copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not (self.is_cpu or src.is_cpu) and _C._is_alias_of(self, src):
        return _overlapping(self, src)  # type: ignore[no-any-return]
    _copy_cpu(
        self if self.is_cpu else to_cpu(self),
        src if src.is_cpu else to_cpu(src),
    )
    return self


def copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return copy_(dst, self)


def copy_from_and_resize(self: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    if dst.shape != self.shape:
        dst.resize_(self.shape)
    return copy_(dst, self)


def to_copy(
    self: torch.Tensor,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: _Memory = None,
) -> Any:
    """torch's own asks for pinned memory if non_blocking, which Python cannot give it."""
    check_device(device)
    to = self.device if device is None else device
    elsewhere = None if to.type in ("cpu", "tpu") else to
    copied = _to_copy_cpu(
        self if self.is_cpu else to_cpu(self),
        dtype=dtype,
        layout=layout,
        device=elsewhere,
        memory_format=memory_format,
    )
    return to_tpu(copied) if to.type == "tpu" else copied


def resize_(self: torch.Tensor, size: _Shape, *, memory_format: _Memory = None) -> torch.Tensor:
    """Like torch's, but memory that grows is new: other views keep the old one."""
    needed = (math.prod(size) + self.storage_offset()) * self.element_size()
    if needed > self.untyped_storage().nbytes():
        new = _empty_cpu(size, dtype=self.dtype, memory_format=memory_format)
        kept = min(self.numel(), new.numel())
        flat = new.as_strided([kept], [1])
        flat.copy_(bare_cpu(self.as_strided([kept], [1])))
        swap(self, bare_tpu(new))
        return self
    return _resize_cpu(self, size, memory_format=memory_format)  # type: ignore[no-any-return]


def set_tensor(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    swap(self, source)
    return self


def set_nothing(self: torch.Tensor) -> torch.Tensor:
    swap(self, bare_tpu(_empty_cpu([0], dtype=self.dtype)))
    return self


def read_scalar(self: torch.Tensor) -> Any:
    return to_cpu(self).item()


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """With the CPU's fused kernel where the CPU takes it: torch asks no other device."""
    rest: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    given = [t for t in (query, key, value, attn_mask) if t is not None]
    masked = attn_mask is not None and attn_mask.requires_grad
    # The CPU's choice raises if sdpa_kernel() allows SDPBackend.OVERRIDEABLE only, a TPU's own.
    if _C._get_flash_sdp_enabled() and not masked and all(map(_is_plain, given)):
        aliases = [None if t is None else to_cpu(t) for t in (query, key, value, attn_mask)]
        if _choose_attention_cpu(*aliases, dropout_p, is_causal, **rest) == _FLASH:
            mask = attn_mask
            if mask is not None and mask.dtype is torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)
            return _flash(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
    return _attention_in_parts(query, key, value, attn_mask, dropout_p, is_causal, **rest)


_FLASH = 1  # sdp::SDPBackend::flash_attention
_flash: Any = _aten._scaled_dot_product_flash_attention_for_cpu.default
_attention_in_parts: Any = functools.partial(
    _aten.scaled_dot_product_attention.default._op_dk, _C.DispatchKey.CompositeImplicitAutograd
)


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor is on the device, and not one that stands for others (of vmap, dynamo)."""
    wrapped = _C._functorch.is_functorch_wrapped_tensor(value)
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not (wrapped or value.is_cpu)


def native_dropout(input: torch.Tensor, p: float, train: bool | None) -> tuple[Any, Any]:
    """The CPU's, but with the device's generator, which the operation itself is not given."""
    values = to_cpu(input)
    mask = torch.empty_like(values, dtype=torch.bool, device="cpu")
    if train is False:
        return to_tpu(values.clone()), bare_tpu(mask.fill_(True))
    generator = seeds.default_generator()
    generator.drew(mask.bernoulli_(1 - p, generator=generator.begin()))
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return to_tpu(values.mul(mask).mul_(scale)), bare_tpu(mask)


def lstm_cell(
    input_gates: Any, hidden_gates: Any, cx: Any, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Any, Any, Any]:
    """torch takes the fused kernel for each device but the CPU, which has none."""
    gates = input_gates + hidden_gates
    if input_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * cx + i * g
    return o * c.tanh(), c, torch.cat([i, f, g, o], 1)


def gru_cell(
    input_gates: Any, hidden_gates: Any, hx: Any, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Any, Any]:
    """As `lstm_cell`."""
    if input_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    ir, iz, ig = input_gates.chunk(3, 1)
    hr, hz, hg = hidden_gates.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (ig + r * hg).tanh()
    return (hx - n) * z + n, torch.cat([r, z, n, hx, hg], 1)


def zero_tensor(size: _Shape, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    """Zeros without memory, which have no place in DLPack."""
    return torch.zeros(size, dtype=dtype, device="tpu")


PINNED = "_pinned_for_tpu"
"""Attribute of the storage of a CPU tensor that `.pin_memory()` made."""


def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    pinned = self.clone()
    setattr(pinned.untyped_storage(), PINNED, True)
    return pinned


def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    return getattr(self.untyped_storage(), PINNED, False)


def _take_remainder(self: Any, other: Any) -> Any:
    """take_along_dim calls it with a number where the schema wants a tensor."""
    return _remainder(self, other if isinstance(other, torch.Tensor) else torch.tensor(other))


def _with_indices(name: str, at: int) -> Kernel:
    kernel = make_kernel(find_op(name))

    def indexed(*args: Any, **kwargs: Any) -> Any:
        indices = [i.to("tpu") if isinstance(i, torch.Tensor) and i.is_cpu else i for i in args[at]]
        return kernel(*args[:at], indices, *args[at + 1 :], **kwargs)

    return indexed


_remainder = make_kernel(_aten.remainder.Tensor)

OWN: dict[str, Kernel] = {
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "copy_": copy_,
    "_copy_from": copy_from,
    "_copy_from_and_resize": copy_from_and_resize,
    "_to_copy": to_copy,
    "resize_": resize_,
    "set_.source_Tensor": set_tensor,
    "set_": set_nothing,
    "_local_scalar_dense": read_scalar,
    "scaled_dot_product_attention": attention,
    "native_dropout": native_dropout,
    "_efficientzerotensor": zero_tensor,
    "is_pinned": lambda self, device=None: False,
    "_pin_memory": lambda self, device=None: self,
    "record_stream": lambda self, stream: None,
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_gru_cell": gru_cell,
    "remainder.Tensor": _take_remainder,
}

COMPOSED = "_thnn_fused_lstm_cell _thnn_fused_gru_cell scaled_dot_product_attention".split()
"""The operators of OWN that are composed of others, and so have their gradients."""
_TAKEN_APART = (
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)


def _direct_names() -> Iterator[str]:
    """Operations that torch would take apart first: one call of Python instead of several."""
    registered = _C._dispatch_get_registrations_for_dispatch_key
    taken_apart = {name for key in _TAKEN_APART for name in registered(key)}
    names = taken_apart.intersection(registered("CPU"))
    names.update(n for n in taken_apart if n.startswith("aten::_foreach_"))
    yield from (n.removeprefix("aten::") for n in sorted(names) if n.startswith("aten::"))


def _when_called(name: str) -> Kernel:
    """Made by its first call: making all takes longer than all else that installing does."""
    made: list[Kernel] = []

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(make_kernel(find_op(name)))
        return made[0](*args, **kwargs)

    return kernel


_kernels: dict[Any, Kernel] = {}


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Every other operation."""
    kernel = _kernels.get(op)
    if kernel is None:
        kernel = _kernels[op] = make_kernel(op)
    return kernel(*args, **kwargs)


def register() -> list[Any]:
    """Register all; returns what must be kept for as long as the kernels are needed."""
    aten, everything = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    table = dict(OWN)
    for name in METADATA_ONLY:
        table[name] = functools.partial(find_op(name)._op_dk, KEY)
    for name, at in CPU_INDICES.items():
        table[name] = _with_indices(name, at)
    for name in itertools.chain(COMPOSITE, _direct_names()):
        if name not in table:
            table[name] = _when_called(name)
    for name, kernel in table.items():
        aten.impl(name, kernel, "PrivateUse1")
    for name in COMPOSED:
        aten.impl(name, OWN[name], "AutogradPrivateUse1")
    aten.impl("_pin_memory", pin_memory, "CPU")
    aten.impl("is_pinned", is_pinned, "CPU")
    everything.fallback(fallback, "PrivateUse1")
    for key, kind in NOT_DENSE.items():
        everything.fallback(functools.partial(_refuse_layout, kind), key)
    return [aten, everything]


def _refuse_layout(kind: str, op: Any, *args: Any, **kwargs: Any) -> Any:
    raise not_dense(kind)
