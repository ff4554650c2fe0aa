"""Runs the operations of torch's own database on the device and on the CPU, and compares them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

Variant = Literal["call", "inplace", "out"]

RANDOM = (
    "empty",
    "new_empty",
    "empty_like",
    "new_empty_strided",
    "empty_strided",
    "empty_permuted",
)
"""What these return is whatever was in memory: only its shape is compared."""


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def database(dtype: Any) -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if dtype in op.dtypes]


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(change, value)


def _moved(value: Any) -> Any:
    """A sample on the device, as leaves that want the gradients that the sample's leaves want."""
    import torch

    def move(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.detach().to("tpu").requires_grad_(item.requires_grad)
        return torch.device("tpu") if isinstance(item, torch.device) else item

    return _map(value, move)


def _kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    moved: dict[str, Any] = _moved(kwargs)
    return {k: "tpu" if k == "device" and v == "cpu" else v for k, v in moved.items()}


def _tensors(value: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [item for item in tree_leaves(value) if isinstance(item, torch.Tensor)]


def _compare(what: str, wanted: Any, found: Any, values: bool = True) -> None:
    import torch

    wanted, found = _tensors(wanted), _tensors(found)
    assert len(wanted) == len(found), f"{what}: {len(found)} tensors, not {len(wanted)}"
    for want, got in zip(wanted, found, strict=True):
        assert got.device.type == "tpu", f"{what} is on {got.device}"
        assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
        assert got.dtype == want.dtype, f"{what}: {got.dtype}, not {want.dtype}"
        assert got.stride() == want.stride() or not want.numel(), (
            f"{what}: strides {got.stride()}, not {want.stride()}"
        )
        if values:
            close = {"rtol": 0.03, "atol": 3e-3} if want.dtype is torch.bfloat16 else {}
            torch.testing.assert_close(
                got.detach().cpu(),
                want.detach(),
                equal_nan=True,
                msg=lambda m: f"{what}: {m}",
                **close,
            )


def _samples(op: Any, dtype: Any, gradients: bool, count: int) -> Iterator[Any]:
    import torch

    torch.manual_seed(0)
    return itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=gradients), count)


def difference(op: Any, dtype: Any, variant: Variant, count: int) -> str | None:
    """What is different on the device in the first `count` samples; None: nothing is."""
    compare = {"call": _call, "inplace": _inplace, "out": _out}[variant]
    differentiable = dtype.is_floating_point or dtype.is_complex
    gradients = variant == "call" and op.supports_autograd and differentiable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in _samples(op, dtype, gradients, count):
            try:
                compare(op, sample, gradients)
            except Exception as error:  # any error of an operation is a difference
                return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
    return None


class _RefusedError(Exception):
    """The CPU refuses a sample as well."""


def _on_cpu(run: Callable[[], Any]) -> Any:
    import torch

    torch.manual_seed(0)
    try:
        return run()
    except Exception as error:
        raise _RefusedError from error


def _call(op: Any, sample: Any, gradients: bool) -> None:
    import torch

    try:
        wanted = _on_cpu(lambda: op(sample.input, *sample.args, **sample.kwargs))
    except _RefusedError:
        return
    given, args, kwargs = _moved(sample.input), _moved(sample.args), _kwargs(sample.kwargs)
    torch.manual_seed(0)
    found = op(given, *args, **kwargs)
    _compare("result", wanted, found, op.name not in RANDOM)
    if gradients:
        leaves = sample.input, sample.args, sample.kwargs
        try:
            expected = _on_cpu(lambda: _gradients(wanted, leaves))
        except _RefusedError:
            return
        torch.manual_seed(0)
        _compare("gradient", expected, _gradients(found, (given, args, kwargs)))


def _gradients(results: Any, leaves: Any) -> list[Any]:
    import torch

    outputs = [r for r in _tensors(results) if r.requires_grad]
    inputs = [leaf for leaf in _tensors(leaves) if leaf.requires_grad]
    if not outputs or not inputs:
        return []
    ones = [torch.ones_like(r) for r in outputs]
    return list(torch.autograd.grad(outputs, inputs, ones, allow_unused=True))


def _inplace(op: Any, sample: Any, gradients: bool) -> None:
    import torch

    function = op.get_inplace()
    if function is None or not isinstance(sample.input, torch.Tensor):
        return
    wanted = sample.input.clone()
    given = _moved(wanted)
    before = given._version
    try:
        _on_cpu(lambda: function(wanted, *sample.args, **sample.kwargs))
    except _RefusedError:
        return
    torch.manual_seed(0)
    returned = function(given, *_moved(sample.args), **_kwargs(sample.kwargs))
    assert returned is given, "returns another tensor"
    assert given._version > before or wanted._version == 0, "the version counter did not change"
    _compare("result", wanted, given, op.name not in RANDOM)


def _out(op: Any, sample: Any, gradients: bool) -> None:
    import torch

    if not op.supports_out:
        return
    try:
        plain = _on_cpu(lambda: op(sample.input, *sample.args, **sample.kwargs))
        for shaped in (lambda x: torch.empty_like(x), lambda x: x.new_empty(0)):
            wanted = _map(plain, lambda x, s=shaped: s(x) if isinstance(x, torch.Tensor) else x)
            out = _moved(wanted)
            _on_cpu(lambda w=wanted: op(sample.input, *sample.args, **sample.kwargs, out=w))
            torch.manual_seed(0)
            given = _moved(sample.input), _moved(sample.args), _kwargs(sample.kwargs)
            op(given[0], *given[1], **given[2], out=out)
            _compare("out", wanted, out, op.name not in RANDOM)
    except _RefusedError:
        return
