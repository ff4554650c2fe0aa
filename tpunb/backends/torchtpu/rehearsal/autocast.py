"""`torch.autocast("tpu")`: which operations get which type.

The lists are those of CUDA, as torch documents them ("Autocast Op Reference"): TorchTPU's own are
compiled into it, and its documentation compares itself with CUDA.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from tpunb.backends.torchtpu.rehearsal.kernels import find_op

_C: Any = torch._C
_Tensor = torch.Tensor
_Choose = Callable[[Any], torch.dtype | None]

LOWER = """_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linear
linalg_vecdot bmm baddbmm addbmm chain_matmul linalg_multi_dot
scaled_dot_product_attention""".split()
FLOAT32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm group_norm norm.Scalar
norm.ScalarOpt_dim nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss
nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp softmax.int log_softmax.int
cumprod cumsum prod prod.dim_int sum sum.dim_IntList linalg_vector_norm linalg_matrix_norm
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
upsample_trilinear3d upsample_bicubic2d fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn
fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft""".split()
WIDEST = """addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot
scatter_add""".split()


def _tensors(values: Any) -> list[Any]:
    found = []
    for value in values:
        if isinstance(value, _Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _eligible(value: Any) -> bool:
    """What torch's C++ casts for a device: its floating-point tensors, except double precision."""
    return value.is_floating_point() and not value.is_cpu and value.dtype is not torch.float64


def _to_lower(values: Any) -> torch.dtype | None:
    return torch.get_autocast_dtype("tpu")


def _to_float32(values: Any) -> torch.dtype | None:
    return torch.float32


def _to_widest(values: Any) -> torch.dtype | None:
    types = {value.dtype for value in _tensors(values) if _eligible(value)}
    return torch.float32 if torch.float32 in types else None


def _casting(op: Any, choose: _Choose) -> Callable[..., Any]:
    keys = _C.DispatchKeySet(_C.DispatchKey.AutocastPrivateUse1)

    def cast(value: Any, to: torch.dtype) -> Any:
        if isinstance(value, _Tensor):
            return value.to(to) if value.dtype is not to and _eligible(value) else value
        if isinstance(value, (list, tuple)):
            return [cast(item, to) for item in value]
        return value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _C._ExcludeDispatchKeyGuard(keys):
            to = choose((*args, *kwargs.values()))
            if to is not None:
                args = tuple(cast(value, to) for value in args)
                kwargs = {name: cast(value, to) for name, value in kwargs.items()}
            return op(*args, **kwargs)

    return kernel


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy is unsafe in autocast: its logarithms overflow in low precision. "
        "Use binary_cross_entropy_with_logits, or BCEWithLogitsLoss, on the values before sigmoid"
    )


def register() -> list[Any]:
    """Register all; returns what must be kept for as long as autocast is needed."""
    aten, everything = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, choose in ((LOWER, _to_lower), (FLOAT32, _to_float32), (WIDEST, _to_widest)):
        for name in names:
            aten.impl(name, _casting(find_op(name), choose), "AutocastPrivateUse1")
    aten.impl("binary_cross_entropy", _refuse, "AutocastPrivateUse1")
    _set_default()
    return [aten, everything]


def _set_default() -> None:
    """bfloat16, in each thread: torch keeps the type by thread, and begins with float16."""
    torch.set_autocast_dtype("tpu", torch.bfloat16)
    done = threading.local()
    done.here = True
    context: Any = torch.amp.autocast_mode.autocast
    init = context.__init__

    @functools.wraps(init)
    def initialise(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "tpu" and not hasattr(done, "here"):
            torch.set_autocast_dtype("tpu", torch.bfloat16)
            done.here = True
        init(self, device_type, *args, **kwargs)

    context.__init__ = initialise
