"""Private names of torch_xla and libraries on it that tpunb replaces or reads: all, and why.

Data only: importing this imports none of them and changes nothing.

The names are at the lowest level in Python, below `xm.*`, `torch.distributed` and what is
built on them. So everything above follows, also names that were imported before the
replacement (`from torch_xla.core.xla_model import all_reduce`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VERSIONS = ("2.8", "2.9")
"""Versions of torch_xla in which the names were looked up (and are the same)."""

XLAC = "torch_xla._XLAC"
OPS = "_c10d_functional"

Kind = Literal[
    "identity",
    "collective",
    "refused",
    "state",
    "launcher",
    "loader",
    "compiler",
    "meeting",
    "read",
    "spmd",
    "step",
]


@dataclass(frozen=True)
class Name:
    """One private name."""

    owner: str
    """A module, or the namespace of an operator library."""
    name: str
    kind: Kind
    """What becomes of it: 'identity', 'collective', 'compiler', 'meeting' and 'launcher' are
    replaced by functions of the same meaning, 'refused' by one that raises
    NotRehearsedError, 'spmd' by one that raises SpmdError or SetupError, 'state' is set, of a
    'loader' a method is replaced, of a 'step' the end is noticed."""
    why: str
    versions: tuple[str, ...] = VERSIONS


def _each(owner: str, kind: Kind, why: str, *names: str) -> tuple[Name, ...]:
    return tuple(Name(owner, name, kind, why) for name in names)


# Lightning comes as one package, and as the two that it is made of.
TRAINER = ("lightning.pytorch", "pytorch_lightning")
FABRIC = ("lightning.fabric", "lightning_fabric")


def _lightning(kind: Kind, why: str, *places: tuple[tuple[str, str], str, str]) -> tuple[Name, ...]:
    return tuple(
        Name(f"{package}.{module}", name, kind, why, versions=("2.6",))
        for packages, module, name in places
        for package in packages
    )


NAMES: tuple[Name, ...] = (
    *_each(
        XLAC,
        "identity",
        "which of how many processes this is: each rank has an XLA client of its own",
        "_xla_get_process_index",
        "_xla_get_num_processes",
        "_xla_get_default_device_ordinal",
        "_xla_get_device_ordinal",
        "_xla_get_replication_devices_count",
        "_xla_get_replication_devices",
        "_xla_get_all_devices",
        "_xla_get_all_runtime_devices",
        "_xla_get_all_device_attributes",
        "_xla_num_global_devices",
    ),
    Name(
        XLAC,
        "_xla_set_replication_devices",
        "identity",
        "the XLA client knows one device; xm.set_replication would name devices it has not",
    ),
    Name(
        XLAC,
        "_xla_memory_info",
        "identity",
        "XLA's client for CPUs raises; a training loop that logs xm.get_memory_info() must run",
    ),
    *_each(
        "torch_xla.runtime",
        "state",
        "xr.world_size() and xr.global_ordinal() keep their first answer here, and the prelude "
        "may have asked before the fork",
        "_WORLD_SIZE",
        "_ORDINAL",
    ),
    *_each(
        XLAC,
        "collective",
        "xm.all_reduce with scale, groups or a list; all of xm.optimizer_step, "
        "xm.reduce_gradients, xm.collective_broadcast, ProcessGroupXla",
        "_xla_all_reduce",
        "_xla_all_reduce_inplace",
    ),
    *_each(
        XLAC,
        "collective",
        "xm.all_gather with pin_layout=False, output or a list",
        "_xla_all_gather",
        "_xla_all_gather_out",
        "_xla_all_gather_coalesced",
        "_xla_all_gather_coalesced_out",
    ),
    *_each(
        XLAC,
        "collective",
        "xm.reduce_scatter: of one tensor or a list, with output and without",
        "_xla_reduce_scatter",
        "_xla_reduce_scatter_out",
        "_xla_reduce_scatter_coalesced",
        "_xla_reduce_scatter_coalesced_out",
    ),
    Name(XLAC, "_xla_all_to_all", "collective", "xm.all_to_all"),
    Name(
        XLAC,
        "_xla_collective_permute",
        "collective",
        "xm.collective_permute, and torch.distributed's send and recv",
    ),
    Name(
        XLAC,
        "_set_all_reduce_token",
        "collective",
        "torch_xla.sync() ends a program, of which XLA wants all all-reduces pinned or none",
    ),
    *_each(
        OPS,
        "collective",
        "torch.distributed in torch.compile, and xm.all_reduce without scale, groups and list, so "
        "that dynamo can trace it",
        "all_reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
    ),
    Name(
        "torch_xla.core.xla_model",
        "_all_gather_using_all_reduce",
        "collective",
        "xm.all_gather with pin_layout, its default: upstream reduces what each rank has padded "
        "with zeros, a program for each rank and as many times the bytes as there are ranks",
    ),
    Name(
        "torch_xla.core.xla_model",
        "xla_rendezvous",
        "collective",
        "xm.rendezvous and xm.mesh_reduce: upstream's way through tensors compiles a program "
        "for each size of payload",
    ),
    *_each(
        XLAC,
        "refused",
        "a channel does not say which ranks it joins, and upstream knows no way to use one on a "
        "TPU (pytorch/xla#8074); use xm.collective_permute",
        "_xla_send",
        "_xla_recv",
    ),
    *_each(
        XLAC,
        "spmd",
        "xr.use_spmd() begins with the first, and comes to the second after a device was used: "
        "refused in one of several ranks, and the second where SPMD has several CPU devices",
        "_xla_get_spmd_config_is_locked",
        "_xla_force_spmd_device",
    ),
    Name(XLAC, "_xla_mark_sharding", "spmd", "refused in one of several ranks"),
    *_each(
        XLAC,
        "spmd",
        "a rank has one device: threads for several, as on a TPU v2 or v3, are refused",
        "_xla_get_devices",
        "_xla_num_devices",
    ),
    *_each(
        XLAC,
        "refused",
        "SPMD is another mode: one process that drives all cores",
        "_xla_spmd_all_reduce",
        "_xla_spmd_reduce_scatter",
    ),
    *_each(
        XLAC,
        "read",
        "all live tensors are computed before some are read: computing only those that are "
        "read may donate a buffer that others still need ('Check failed: !buffer->IsDeleted()')",
        "_xla_sync_live_tensors",
        "_xla_get_cpu_tensors",
    ),
    *_each(
        XLAC,
        "read",
        "whether a tensor has to be computed, and its memory, which on the CPU is not copied; the "
        "handles are asked for because _to_dlpack ends the process where a tensor has no memory",
        "_check_tensor_need_materialization",
        "_xla_wait_device_ops",
        "_get_tensors_handle",
        "_to_dlpack",
        "_from_dlpack",
    ),
    *_each(
        XLAC,
        "read",
        "the ranks compare the programs that lead to their collectives: a hash, and for people "
        "the operations",
        "_get_graph_hash",
        "_get_xla_tensors_text",
    ),
    *_each(
        XLAC,
        "read",
        "torch_xla.compile(full_graph=True) forbids programs that end in it, as one does at a "
        "rehearsed collective",
        "_get_allow_execution",
        "_set_allow_execution",
    ),
    Name(
        XLAC,
        "_xla_increment_counter",
        "read",
        "the counters of torch_xla.debug.metrics that its own collectives count in",
    ),
    Name(
        XLAC,
        "_xla_step_marker",
        "step",
        "torch_xla.sync(), xm.mark_step() and the loaders' next batch end a step here: a rank "
        "looks whether XLA compiled again",
    ),
    Name(
        "torch_xla._dynamo.dynamo_bridge",
        "extract_compiled_graph_helper",
        "compiler",
        "torch.compile: a graph with collectives is run by lazy tensors, all others as ever",
    ),
    *_each(
        "torch.distributed.rendezvous",
        "meeting",
        "where init_process_group meets: what xla:// is, and who serves the store of env://",
        "_rendezvous_handlers",
        "_create_c10d_store",
    ),
    *_each(
        "torch_xla._internal.pjrt",
        "launcher",
        "torch_xla.launch and xmp.spawn end here, however they were imported",
        "spawn",
        "run_multiprocess",
    ),
    Name(
        "torch_xla.torch_xla",
        "dist",
        "launcher",
        "torch_xla.launch asks it whether torch elastic is above, to pass the local rank",
    ),
    Name(
        "torch_xla.distributed.parallel_loader",
        "ParallelLoader",
        "loader",
        "_loader_worker, _cpu_loader, _exception_queue: an error in the data set ends the loop "
        "without a word",
    ),
    Name(
        "accelerate.launchers",
        "notebook_launcher",
        "launcher",
        "starts processes; accelerate and the user hold the function itself, so its code is "
        "replaced",
        versions=("1.x",),
    ),
    *_lightning(
        "launcher",
        "starts processes, and waits for what rank 0 alone sends back: launch calls here",
        (TRAINER, "strategies.launchers.xla", "_XLALauncher"),
        (FABRIC, "strategies.launchers.xla", "_XLALauncher"),
    ),
    *_lightning(
        "state",
        "_launched: outside of its launcher a strategy takes itself for rank 0 of 1",
        (TRAINER, "strategies.xla", "XLAStrategy"),
        (FABRIC, "strategies.xla", "XLAStrategy"),
        (FABRIC, "strategies.xla_fsdp", "XLAFSDPStrategy"),
    ),
    *_lightning(
        "state",
        "its attribute rank is read from the environment when Lightning is imported, which may "
        "have been before the fork",
        (FABRIC, "utilities.rank_zero", "rank_zero_only"),
    ),
    *_lightning(
        "state",
        "auto_device_count and is_available keep their first answer, which may be the prelude's",
        (FABRIC, "accelerators.xla", "XLAAccelerator"),
    ),
    Name(
        "torch_xla._internal.tpu",
        "num_available_devices",
        "identity",
        "Lightning's accelerator='tpu' takes as many cores as this counts on the PCI bus",
    ),
)


def named(kind: Kind, owner: str | None = None) -> list[str]:
    """The names of a kind, of one owner or of all."""
    return [n.name for n in NAMES if n.kind == kind and owner in (None, n.owner)]
