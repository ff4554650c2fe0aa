"""Operators that torch_tpu 0.2.0 lacks, or that do something else on a TPU.

Sources:

- the library: operators of torch 2.13 that have a kernel for the CPU and none that a backend could
  use instead (Composite…), and of which no overload is among the names in
  `libpywrap_2_13_0_common.so` of torch_tpu 0.2.0's wheel, where the names of registered kernels are
  (435 of 676; each has a function `torch_tpu::Aten…` among its symbols). Others reach
  `TpuMissingOpFallback`, which raises "… is not implemented for TPU", or uses the CPU where that
  is switched on. Only those that people use are listed here; no TPU was at hand to try them.
- transformers' tests on a v6e (torch_tpu 0.1.1, 2026-09-24), which list the gaps that they met.
- `MISSING` of the rehearsal's process groups: collectives that ProcessGroupTpu does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VERSION = "torch_tpu 0.2.0"
MISSING = f"is not implemented for TPUs as of {VERSION}"

_REPLACEMENTS: Mapping[str, str] = {
    "smooth_l1_loss": "`d = (x - y).abs()`, `torch.where(d < 1, d * d / 2, d - 0.5).mean()`",
    "huber_loss": "`d = (x - y).abs()`, `torch.where(d < 1, d * d / 2, d - 0.5).mean()`",
    "mish": "`x * torch.tanh(F.softplus(x))`",
    "hardshrink": "`torch.where(x.abs() > 0.5, x, 0)`",
    "softshrink": "`x.sign() * F.relu(x.abs() - 0.5)`",
    "rrelu_with_noise": "`F.leaky_relu`",
    "erfc": "`1 - torch.erf(x)`",
    "logaddexp": "`torch.logsumexp(torch.stack([a, b]), 0)`",
    "hypot": "`(a * a + b * b).sqrt()`",
    "nansum": "`torch.nan_to_num(x).sum()`",
    "std_mean": "`x.std()` and `x.mean()`",
    "median": "`torch.sort`, and the value in the middle",
    "nanmedian": "`torch.sort`, and the value in the middle",
    "kthvalue": "`torch.topk`",
    "histogram": "`torch.histc`",
    "triu_indices": '`torch.triu_indices(…, device="cpu")`, moved once',
    "unique_dim": "`torch.unique` without `dim`, or on the CPU before the loop",
    "_upsample_bilinear2d_aa": "`antialias=False`, or resize on the CPU in the DataLoader",
    "_upsample_bicubic2d_aa": "`antialias=False`, or resize on the CPU in the DataLoader",
    "upsample_trilinear3d": '`mode="nearest"`, or `F.conv_transpose3d`',
}
"""What to write instead."""
_OTHERS = (
    "logaddexp2 copysign heaviside sinc i0 igamma igammac frexp gcd nextafter renorm addbmm "
    "linalg_cross linalg_cholesky_ex cholesky cholesky_inverse linalg_lstsq linalg_eig "
    "_linalg_eigh _linalg_eigvals _linalg_det _linalg_slogdet linalg_matrix_exp "
    "linalg_ldl_factor_ex triangular_solve poisson binomial _standard_gamma _sample_dirichlet "
    "log_normal_ cauchy_ geometric_ fractional_max_pool2d fractional_max_pool3d "
    "adaptive_max_pool3d max_unpool2d max_unpool3d multi_margin_loss "
    "multilabel_margin_loss_forward _to_sparse _int_mm _transform_bias_rescale_qkv "
    "batch_norm_update_stats _amp_foreach_non_finite_check_and_unscale_ "
    "special_bessel_j0 special_bessel_j1 special_i1 special_zeta special_ndtri special_erfcx"
).split()
_COLLECTIVES: Mapping[str, str] = {
    "reduce_": "`dist.all_reduce`",
    "allreduce_coalesced_": "`dist.all_reduce` for each tensor",
    "allgather_coalesced_": "`dist.all_gather_into_tensor` for each tensor",
    "recv_any_source_": "`dist.recv(tensor, src=…)`",
}
OPERATORS: Mapping[str, str] = {
    **dict.fromkeys(_OTHERS, "do this on the CPU, outside of the loop"),
    **{name: f"use {instead}" for name, instead in _REPLACEMENTS.items()},
    "_amp_foreach_non_finite_check_and_unscale_": (
        "leave GradScaler out: it is for float16, and bfloat16 needs no scaling"
    ),
}
"""Operators of aten by name, without overload, and what to do instead."""
COLLECTIVES: Mapping[str, str] = {name: f"use {use}" for name, use in _COLLECTIVES.items()}
"""Operators of c10d, and what to do instead."""
DIFFERENT: Mapping[str, tuple[str, str]] = {
    "multinomial": (
        "ignored the seed on TPUs (transformers' tests of torch_tpu 0.1.1), so a run could not be "
        "repeated",
        "sample on the CPU: `torch.multinomial(weights.cpu(), n)`, outside of the loop if possible",
    ),
    "_ctc_loss": (
        "ended the process on TPUs with torch_tpu 0.1.1 (transformers' tests); 0.2.0 has a new "
        "kernel, which tpunb has not tried",
        "try it on the TPU in a cell of its own first, or compute this loss on the CPU",
    ),
}
"""Operators that exist: what they did on a TPU, and what to do instead."""
SAME_SIZE = (
    "ended the process on TPUs if the size stayed the same (transformers' tests of torch_tpu "
    "0.1.1)",
    "call it only if the size changes",
)
"""As above, for the interpolations (upsample_…)."""


def find_gap(namespace: str, name: str, args: Sequence[object]) -> tuple[str, str] | None:
    """What is wrong with an operator on a TPU, and what to do instead; None if nothing is known.

    Args:
        namespace: 'aten', 'c10d'.
        name: The operator's name, without overload.
        args: Its positional arguments.
    """
    table = {"aten": OPERATORS, "c10d": COLLECTIVES}.get(namespace, {})
    if name in table:
        return MISSING, table[name]
    if namespace == "aten" and name.startswith("upsample_") and not name.endswith("_backward"):
        size, wanted = (list(getattr(args[0], "shape", ()))[2:], args[1])
        return SAME_SIZE if isinstance(wanted, list) and list(wanted) == size else None
    return DIFFERENT.get(name) if namespace == "aten" else None
