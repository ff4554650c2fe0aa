"""All private names of torch, torch_xla and libraries built on them that tpunb uses, and why.

Only modules of `tpunb.xla` may use them; tests/xla/test_private_names.py checks that, and that the
names still exist with the same signatures.

Data only: importing this module imports no library and changes nothing.

Replaced names are at the lowest level in Python, below `xm.*`, `torch.distributed` and libraries
built on them. So everything above follows, including names that were imported before the
replacement (`from torch_xla.core.xla_model import all_reduce`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VERSIONS = ("2.8", "2.9")
"""Versions of torch and torch_xla in which the names were checked, and are the same."""

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
    "attribute",
]


@dataclass(frozen=True)
class Name:
    """One private name."""

    owner: str
    """A module, the namespace of an operator library, or the class of an 'attribute'."""
    name: str
    kind: Kind
    """How it is used. 'identity', 'collective', 'compiler', 'meeting' and 'launcher' are
    replaced by functions of the same meaning, 'refused' by one that raises NotRehearsedError,
    'spmd' by one that raises SpmdError or SetupError; 'state' is set; a 'loader' has a method
    replaced; a 'step' is wrapped; 'read' and 'attribute' are only called or read."""
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
        "the number of this process and of all: each rank has an XLA client of its own",
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
        "the XLA client knows one device; xm.set_replication would name devices that it lacks",
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
        "xr.world_size() and xr.global_ordinal() cache their first answer here, and the prelude "
        "may have called them before the fork",
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
        "torch_xla.sync() ends a program, in which XLA wants all all-reduces pinned or none",
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
        "xm.all_gather with pin_layout, its default: upstream reduces tensors that each rank has "
        "padded with zeros: a program per rank, and the bytes times the number of ranks",
    ),
    Name(
        "torch_xla.core.xla_model",
        "xla_rendezvous",
        "collective",
        "xm.rendezvous and xm.mesh_reduce: upstream sends payloads as tensors and compiles a "
        "program for each size of payload",
    ),
    *_each(
        XLAC,
        "refused",
        "a channel does not name the ranks that it joins, and upstream knows no way to use one on "
        "a TPU (pytorch/xla#8074); use xm.collective_permute",
        "_xla_send",
        "_xla_recv",
    ),
    *_each(
        XLAC,
        "spmd",
        "xr.use_spmd() calls the first at once, and the second if a device was used before: "
        "refused in one of several ranks, and the second if SPMD has several CPU devices",
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
        "handles are read because _to_dlpack ends the process if a tensor has no memory",
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
        "torch_xla.compile(full_graph=True) forbids programs that end within it, as one does at "
        "a rehearsed collective",
        "_get_allow_execution",
        "_set_allow_execution",
    ),
    *_each(
        XLAC,
        "read",
        "which collectives a value depends on: the inputs of its graph, by their numbers; in eager "
        "mode none, because each runs when it is called",
        "_get_tensors_xla_device_data_node",
        "_get_use_eager_mode",
    ),
    Name(
        XLAC,
        "_xla_sync_multi",
        "step",
        "xm.save and xm.unlazy run the programs of tensors with it, on every rank",
    ),
    Name(
        XLAC,
        "_xla_increment_counter",
        "read",
        "the counters of torch_xla.debug.metrics that its own collectives increment",
    ),
    Name(
        XLAC,
        "_xla_step_marker",
        "step",
        "torch_xla.sync(), xm.mark_step() and the loaders' next batch end a step here: ranks and "
        "%%tpu_debug check whether XLA compiled again",
    ),
    Name(
        XLAC,
        "_xla_runtime_is_initialized",
        "read",
        "whether this process uses a device: it cannot be forked then, and has counters to read",
    ),
    Name(
        XLAC,
        "_xla_get_tensor_id",
        "read",
        "the same for a tensor and its detached copies, so that tied weights stay tied in a save",
    ),
    Name(
        "torch_xla.core.xla_model",
        "_run_step_closures",
        "read",
        "its frame: values that step closures read do not slow the loop",
    ),
    *_each(
        "torch_xla._internal.tpu",
        "read",
        "a rank's own chip: how many there are, and the environment that selects one",
        "num_available_chips",
        "configure_one_chip_topology",
        "configure_topology",
    ),
    *_each(
        "torch_xla._internal.pjrt",
        "read",
        "a rank starts the runtime as torch_xla's own launcher does",
        "initialize_singleprocess",
    ),
    *_each(
        "torch_xla.distributed.parallel_loader.MpDeviceLoader",
        "attribute",
        "the loader inside is replaced, in a copy",
        "_loader",
        "_parallel_loader",
    ),
    *_each(
        "torch_xla.distributed.parallel_loader.ParallelLoader",
        "attribute",
        "the thread that reads the data set, its loader, and the queue for its errors",
        "_loader_worker",
        "_cpu_loader",
        "_exception_queue",
    ),
    *_each(
        "torch",
        "read",
        "inside an XLA tensor is the tensor of the computation: for tpunb.log, which keeps a value "
        "without computing it, for SPMD's sharded tensors, and to overwrite a view",
        "_is_functional_tensor",
        "_sync",
        "_from_functional_tensor",
    ),
    Name("torch", "_to_cpu", "read", "copies a list of tensors to the CPU at once"),
    Name("torch", "_foreach_copy_", "read", "copies a list of tensors in one operation"),
    *_each(
        "torch.Tensor",
        "attribute",
        "whether a tensor was changed in place, is a view, or shares its memory",
        "_version",
        "_is_view",
        "_use_count",
    ),
    Name("torch.UntypedStorage", "_cdata", "attribute", "the argument of _storage_Use_Count"),
    Name(
        "torch._C",
        "_storage_Use_Count",
        "read",
        "whether XLA has released memory that it took over, so that the memory can be reused",
    ),
    Name(
        "torch.autograd.Variable",
        "_execution_engine",
        "attribute",
        "every backward pass goes through its run_backward: the first is noticed",
    ),
    Name("torch._ops", "OpOverload", "read", "the operators of a graph: which are collectives?"),
    *_each(
        "torch._C._distributed_c10d.ProcessGroupGloo",
        "attribute",
        "gloo without a process group of the user's: large tensors of rehearsed collectives",
        "_Options",
        "_allgather_base",
    ),
    Name(
        "torch_xla._dynamo.dynamo_bridge",
        "extract_compiled_graph_helper",
        "compiler",
        "torch.compile: a graph with collectives is run by lazy tensors, all others as usual",
    ),
    *_each(
        "torch.distributed.rendezvous",
        "meeting",
        "the rendezvous of init_process_group: of xla://, and the store of env://",
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
        "torch_xla.launch checks with it for torch elastic, to pass the local rank",
    ),
    Name(
        "torch_xla.distributed.parallel_loader",
        "ParallelLoader",
        "loader",
        "_loader_worker is replaced: an error in the data set silently ends the loop; next_item is "
        "timed, as below",
    ),
    Name(
        "torch.utils.data.dataloader",
        "_BaseDataLoaderIter",
        "loader",
        "__next__ is timed: how long the loop waits for its input",
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
        "starts processes, and waits for a result of rank 0: launch calls the function instead",
        (TRAINER, "strategies.launchers.xla", "_XLALauncher"),
        (FABRIC, "strategies.launchers.xla", "_XLALauncher"),
    ),
    *_lightning(
        "state",
        "_launched: outside of its launcher a strategy acts as rank 0 of 1",
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
        "auto_device_count and is_available cache their first answer, which may be the prelude's",
        (FABRIC, "accelerators.xla", "XLAAccelerator"),
    ),
    Name(
        "torch_xla._internal.tpu",
        "num_available_devices",
        "identity",
        "Lightning's accelerator='tpu' uses as many cores as this counts on the PCI bus",
    ),
    Name(
        "torch_xla.amp.autocast_mode",
        "xm",
        "identity",
        "torch_xla.amp.autocast checks with it whether the device is a TPU, and fails if not",
    ),
    *_each(
        XLAC,
        "identity",
        "CheckpointManager starts a service for notices of preemption, which no rehearsal gets",
        "_ensure_xla_coordinator_initialized",
        "_activate_preemption_sync_manager",
        "_sync_point_reached",
    ),
)


METRICS = "torch_xla.debug.metrics"
"""Public, and so are its functions. The names of the counters below are torch_xla's own."""
MARK_STEP = "MarkStep"
UNCACHED_COMPILE = "UncachedCompile"
CACHED_COMPILE = "CachedCompile"
"""Programs that were started: compiled for this start, and compiled before."""
COMPILE_TIME = "CompileTime"
"""Nanoseconds (2.9: metric_data returns the number of samples, their sum, and the last ones)."""
EXECUTE_TIMES = ("ExecuteTime", "ExecuteReplicatedTime")
"""Timed each time a program has been started: on one device, and in SPMD mode."""
GRAPH_SIZE = "TensorsGraphSize"
"""Operations of a program."""
COLLECTIVES = (
    "xla::AllReduce",
    "xla::AllReduceInPlace",
    "xla::AllGather",
    "xla::AllGatherOut",
    "xla::ReduceScatter",
    "xla::ReduceScatterOut",
    "xla::all_reduce",
    "xla::all_gather_into_tensor",
    "xla::reduce_scatter_tensor",
)
"""Collectives that may average gradients or parameters."""
CREATE_TENSOR = "CreateXlaTensor"
CREATE_HANDLE = "CreateDataHandles"
"""Values on the device: results of programs, and values moved to the device."""
READ_TENSOR = "xla::_to_cpu"
READ_SCALAR = "aten::_local_scalar_dense"
"""Reads of values: of a tensor, and of a single number. torch_xla counts the second as an operator
that XLA lacks."""

TENSOR_VERSION = "_version"
"""A tensor's count of changes in place, which autograd checks. Reading it runs no program."""
STEP_CLOSURES = "_run_step_closures"
"""The function of torch_xla.sync() that runs step closures: they may read values."""
SHARDED = "_is_sharded"
"""An attribute of the parameters of XlaFullyShardedDataParallel: this rank holds a part of them."""
REDUCING = ("reduce_gradients", "all_reduce")
"""Public functions of torch_xla.core.xla_model that a step calls before the optimizer's step."""


def names_of_kind(kind: Kind, owner: str | None = None) -> list[str]:
    """The names of a kind, of one owner or of all."""
    return [n.name for n in NAMES if n.kind == kind and owner in (None, n.owner)]
