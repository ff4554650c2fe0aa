"""What TorchTPU has in place of torch_xla's names (torch_xla 2.9; torch_tpu 0.2.0, torch 2.11)."""

from __future__ import annotations

from typing import NamedTuple

from tpunb.notebook.removed_apis import PL, SPMD, XMP, XR
from tpunb.notebook.scopes import XM

_AMP = "torch_xla.amp"
_PROFILER = "torch_xla.debug.profiler"


class Replacement(NamedTuple):
    """A name of torch_xla, and the code that replaces it."""

    old: str
    new: str
    """Markdown, for the documentation."""


REWRITTEN = (
    Replacement("torch_xla.device", '`torch.device("tpu")`'),
    Replacement("torch_xla.sync", "nothing; with `wait=True`: `torch.accelerator.synchronize()`"),
    Replacement("torch_xla.step", "nothing: its block moves one level out"),
    Replacement("torch_xla.compile", "`torch.compile`, if it gets a function"),
    Replacement("torch_xla.manual_seed", "`torch.manual_seed`"),
    Replacement(
        "torch_xla.launch",
        '`dist.init_process_group("tpu_dist")`, then `fn(dist.get_rank(), …)`, in a train cell',
    ),
    Replacement(f"{XM}.optimizer_step", "`DistributedDataParallel`, or `average_gradients`"),
    Replacement(f"{XM}.reduce_gradients", "`average_gradients`"),
    Replacement(f"{XM}.all_reduce", "`all_reduced`: a copy, because `dist.all_reduce` is in place"),
    Replacement(f"{XM}.all_gather", "`all_gathered`, with `dist.all_gather`"),
    Replacement(f"{XM}.mesh_reduce", "`mesh_reduced`, with `dist.all_gather_object`"),
    Replacement(f"{XM}.broadcast_master_param", "`broadcast_parameters`, with `dist.broadcast`"),
    Replacement(f"{XM}.rendezvous", "`dist.barrier()`"),
    Replacement(f"{XM}.is_master_ordinal", "`dist.get_rank() == 0`"),
    Replacement(f"{XM}.master_print", "`if dist.get_rank() == 0:` and `print`"),
    Replacement(f"{XM}.save", "`torch.save` of tensors on the CPU, on rank 0"),
    Replacement(f"{XM}.add_step_closure", "the call itself"),
    Replacement(f"{XM}.wait_device_ops", "`torch.accelerator.synchronize()`"),
    Replacement(f"{XM}.xla_device_hw", "`torch.accelerator.current_accelerator().type.upper()`"),
    Replacement(f"{XM}.send_cpu_data_to_device", "`to_device`"),
    Replacement(f"{XM}.set_rng_state", "`torch.manual_seed`"),
    Replacement(f"{XR}.device_type", "`torch.accelerator.current_accelerator().type.upper()`"),
    Replacement(f"{XR}.world_size", "`dist.get_world_size()`"),
    Replacement(f"{XR}.global_device_count", "`dist.get_world_size()`"),
    Replacement(f"{XR}.global_runtime_device_count", "`dist.get_world_size()`"),
    Replacement(f"{XR}.global_ordinal", "`dist.get_rank()`"),
    Replacement(f"{XR}.local_ordinal", '`int(os.environ["LOCAL_RANK"])`'),
    Replacement(f"{XR}.initialize_cache", "a comment: set a variable before torch is imported"),
    Replacement(f"{PL}.MpDeviceLoader", "the loader, and `.to(device)` in the loop; or `OnDevice`"),
    Replacement(f"{XMP}.MpModelWrapper", "the model"),
    Replacement(f"{XMP}.MpSerialExecutor", "`OneAtATime`, with `dist.barrier`"),
    Replacement(f"{_AMP}.autocast", '`torch.autocast("tpu", dtype=torch.bfloat16)`'),
    Replacement(f"{_AMP}.syncfree.Adam", "`torch.optim.Adam`"),
    Replacement(f"{_AMP}.syncfree.AdamW", "`torch.optim.AdamW`"),
    Replacement(f"{_AMP}.syncfree.SGD", "`torch.optim.SGD`"),
    Replacement("torch_xla.utils.checkpoint.checkpoint", "`torch.utils.checkpoint.checkpoint`"),
    Replacement(f"{_PROFILER}.Trace", "`torch.profiler.record_function`"),
    Replacement(f"{_PROFILER}.StepTrace", "`torch.profiler.record_function`"),
    Replacement(f"{XM}.RateTracker", "`RateTracker`, the same without smoothing"),
    Replacement("torch_xla.utils.utils.SampleGenerator", "`[data] * count`"),
    Replacement("torch_xla.experimental.eager_mode", "nothing"),
    Replacement(f"{XR}.set_device_type", "nothing"),
    Replacement(f"{XM}.optimization_barrier_", "nothing"),
    Replacement("torch_xla.debug.metrics.clear_all", "nothing"),
    Replacement("torch_xla.debug.metrics.clear_metrics", "nothing"),
    Replacement("torch_xla.debug.metrics.clear_counters", "nothing"),
    Replacement("torch_xla.debug.metrics.metrics_report", "nothing, where it is only printed"),
    Replacement("torch_xla.debug.metrics.short_metrics_report", "nothing, as above"),
    Replacement("torch_xla.backends.set_mat_mul_precision", "`torch.set_float32_matmul_precision`"),
    Replacement("torch_xla.__version__", "`torch.__version__`"),
)
"""Names that are rewritten."""

_SHARDED = (
    "TorchTPU has no such mode, one process drives one core: write it with `init_device_mesh('tpu',"
    " …)` and DTensor, or `fully_shard` of torch.distributed.fsdp."
)
_FULLY_SHARDED = "Use `fully_shard` of torch.distributed.fsdp, on `init_device_mesh('tpu', …)`."
_PROFILE = "Use torch.profiler, which records the TPU too."
_KERNEL = "Write the kernel with torch.tpu.pallas, or use torch's own operation."

BY_HAND = {
    SPMD: _SHARDED,
    f"{XR}.use_spmd": _SHARDED,
    f"{XR}.is_spmd": _SHARDED,
    "torch_xla.distributed.fsdp": _FULLY_SHARDED,
    "torch_xla.experimental.spmd_fully_sharded_data_parallel": _FULLY_SHARDED,
    "torch_xla.experimental.custom_kernel": _KERNEL,
    "torch_xla.experimental.scan": "Write an ordinary loop over the layers.",
    f"{XM}.collective_permute": "Use dist.batch_isend_irecv.",
    f"{XM}.all_to_all": "Use dist.all_to_all_single.",
    f"{XM}.reduce_scatter": "Use dist.reduce_scatter_tensor, or torch.tpu.ops.reduce_scatter_dim.",
    f"{XM}.collective_broadcast": "Call dist.broadcast for each tensor.",
    f"{XM}.all_reduce": "Use dist.all_reduce, which changes the tensor in place, in a group of "
    "dist.new_group if only some ranks take part.",
    f"{XM}.all_gather": "Use dist.all_gather_into_tensor.",
    f"{XM}.optimizer_step": "Average the gradients with dist.all_reduce, then call step().",
    f"{XM}.mesh_reduce": "Use dist.all_gather_object.",
    f"{XM}.rendezvous": "Use dist.barrier(); for values, dist.all_gather_object.",
    f"{XM}.master_print": "Print on rank 0 only: `if dist.get_rank() == 0:`.",
    f"{XM}.save": "Save with torch.save on rank 0, with tensors on the CPU.",
    f"{XM}.get_memory_info": "Use torch.tpu.get_device_properties().total_memory.",
    f"{XM}.get_xla_supported_devices": 'A process has one device, torch.device("tpu").',
    f"{XM}.xla_real_devices": 'A process has one device, torch.device("tpu").',
    f"{XM}.get_rng_state": "Use torch.tpu.get_rng_state.",
    "torch_xla.core.functions": "Use torch.distributed.nn.functional.",
    "torch_xla.launch": "Call the function on each rank, after dist.init_process_group.",
    "torch_xla.compile": "Use torch.compile on a function.",
    f"{PL}.ParallelLoader": "Loop over the loader, and move each batch with .to(device).",
    "torch_xla.distributed.data_parallel": "Put the loop in a function that runs on each rank.",
    "torch_xla.debug.metrics": "Leave it out, or use torch.profiler.",
    "torch_xla.debug.metrics_compare_utils": "Leave it out, or use torch.profiler.",
    _PROFILER: _PROFILE,
    "torch_xla.utils.serialization": "Use torch.save and torch.load.",
    "torch_xla.utils.utils": "Write it without this helper of torch_xla.",
    "torch_xla.test": "Write it without this helper of torch_xla's tests.",
    f"{_AMP}.GradScaler": "Leave it out: bfloat16 has the range of float32.",
    "torch_xla": "TorchTPU has no such name: write it with torch.",
}
"""What to do by hand about names, and modules with all names in them, that stay."""


def advice(name: str) -> str:
    """Return what to do by hand about a full name of torch_xla."""
    while name not in BY_HAND and "." in name:
        name = name.rpartition(".")[0]
    return BY_HAND.get(name, BY_HAND["torch_xla"])
