"""All private names of torch, torch_xla and libraries built on them that tpunb uses, and why.

Only modules of `tpunb.backends.xla` may use them; tests/backends/xla/test_private_names.py checks
that, and that the names still exist with the same signatures.

Data only: importing this module imports no library and changes nothing.

Replaced names are at the lowest level in Python, below `xm.*`, `torch.distributed` and libraries
built on them. So everything above follows, including names that were imported before the
replacement (`from torch_xla.core.xla_model import all_reduce`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

VERSIONS = ("2.8", "2.9")
"""Versions of torch and torch_xla in which the names were checked, and are the same."""

XLAC = "torch_xla._XLAC"
OPS = "_c10d_functional"

NameKind = Literal[
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
    owner: str
    """A module, the namespace of an operator library, or the class of an 'attribute'."""
    name: str
    kind: NameKind
    """How it is used. 'identity', 'collective', 'compiler', 'meeting' and 'launcher' are
    replaced by functions of the same meaning, 'refused' by one that raises NotRehearsedError,
    'spmd' by one that raises SpmdError or SetupError; 'state' is set; a 'loader' has a method
    replaced; a 'step' is wrapped; 'read' and 'attribute' are only called or read."""
    why: str


# By owner and use: names, and why they are used.
_WHY: Mapping[tuple[str, NameKind], Mapping[str, str]] = {
    (XLAC, "identity"): {
        "_xla_get_process_index _xla_get_num_processes _xla_get_default_device_ordinal "
        "_xla_get_device_ordinal _xla_get_replication_devices_count _xla_get_replication_devices "
        "_xla_get_all_devices _xla_get_all_runtime_devices _xla_get_all_device_attributes "
        "_xla_num_global_devices": (
            "the number of this process and of all: each rank has an XLA client of its own"
        ),
        "_xla_set_replication_devices": (
            "the XLA client knows one device; xm.set_replication would name devices that it lacks"
        ),
        "_xla_memory_info": (
            "XLA's client for CPUs raises; a training loop that logs xm.get_memory_info() must run"
        ),
        "_ensure_xla_coordinator_initialized _activate_preemption_sync_manager "
        "_sync_point_reached": (
            "CheckpointManager starts a service for notices of preemption, which no rehearsal gets"
        ),
    },
    ("torch_xla.runtime", "state"): {
        "_WORLD_SIZE _ORDINAL": (
            "xr.world_size() and xr.global_ordinal() cache their first answer here, and the "
            "prelude may have called them before the fork"
        )
    },
    (XLAC, "collective"): {
        "_xla_all_reduce _xla_all_reduce_inplace": (
            "xm.all_reduce with scale, groups or a list; all of xm.optimizer_step, "
            "xm.reduce_gradients, xm.collective_broadcast, ProcessGroupXla"
        ),
        "_xla_all_gather _xla_all_gather_out _xla_all_gather_coalesced "
        "_xla_all_gather_coalesced_out": ("xm.all_gather with pin_layout=False, output or a list"),
        "_xla_reduce_scatter _xla_reduce_scatter_out _xla_reduce_scatter_coalesced "
        "_xla_reduce_scatter_coalesced_out": (
            "xm.reduce_scatter: of one tensor or a list, with output and without"
        ),
        "_xla_all_to_all": "xm.all_to_all",
        "_xla_collective_permute": "xm.collective_permute, and torch.distributed's send and recv",
        "_set_all_reduce_token": (
            "torch_xla.sync() ends a program, in which XLA wants all all-reduces pinned or none"
        ),
    },
    (OPS, "collective"): {
        "all_reduce all_gather_into_tensor reduce_scatter_tensor all_to_all_single": (
            "torch.distributed in torch.compile, and xm.all_reduce without scale, groups and list, "
            "so that dynamo can trace it"
        )
    },
    ("torch_xla.core.xla_model", "collective"): {
        "_all_gather_using_all_reduce": (
            "xm.all_gather with pin_layout, its default: upstream reduces tensors that each rank "
            "has padded with zeros: a program per rank, and the bytes times the number of ranks"
        ),
        "xla_rendezvous": (
            "xm.rendezvous and xm.mesh_reduce: upstream sends payloads as tensors and compiles a "
            "program for each size of payload"
        ),
    },
    (XLAC, "refused"): {
        "_xla_send _xla_recv": (
            "a channel does not name the ranks that it joins, and upstream knows no way to use one "
            "on a TPU (pytorch/xla#8074); use xm.collective_permute"
        ),
        "_xla_spmd_all_reduce _xla_spmd_reduce_scatter": (
            "SPMD is another mode: one process that drives all cores"
        ),
    },
    (XLAC, "spmd"): {
        "_xla_get_spmd_config_is_locked _xla_force_spmd_device": (
            "xr.use_spmd() calls the first at once, and the second if a device was used before: "
            "refused in one of several ranks, and the second if SPMD has several CPU devices"
        ),
        "_xla_mark_sharding": "refused in one of several ranks",
        "_xla_get_devices _xla_num_devices": (
            "a rank has one device: threads for several, as on a TPU v2 or v3, are refused"
        ),
    },
    (XLAC, "read"): {
        "_xla_sync_live_tensors _xla_get_cpu_tensors": (
            "all live tensors are computed before some are read: computing only those that are "
            "read may donate a buffer that others still need ('Check failed: !buffer->IsDeleted()')"
        ),
        "_check_tensor_need_materialization _xla_wait_device_ops _get_tensors_handle _to_dlpack "
        "_from_dlpack": (
            "whether a tensor has to be computed, and its memory, which on the CPU is not copied; "
            "the handles are read because _to_dlpack ends the process if a tensor has no memory"
        ),
        "_get_graph_hash _get_xla_tensors_text": (
            "the ranks compare the programs that lead to their collectives: a hash, and for people "
            "the operations"
        ),
        "_get_allow_execution _set_allow_execution": (
            "torch_xla.compile(full_graph=True) forbids programs that end within it, as one does "
            "at a rehearsed collective"
        ),
        "_get_tensors_xla_device_data_node _get_use_eager_mode": (
            "which collectives a value depends on: the inputs of its graph, by their numbers; in "
            "eager mode none, because each runs when it is called"
        ),
        "_xla_increment_counter": (
            "the counters of torch_xla.debug.metrics that its own collectives increment"
        ),
        "_xla_runtime_is_initialized": (
            "whether this process uses a device: it cannot be forked then, and has counters to read"
        ),
        "_xla_get_tensor_id": (
            "the same for a tensor and its detached copies, so that tied weights stay tied in a "
            "save"
        ),
    },
    (XLAC, "step"): {
        "_xla_sync_multi": (
            "xm.save and xm.unlazy run the programs of tensors with it, on every rank"
        ),
        "_xla_step_marker": (
            "torch_xla.sync(), xm.mark_step() and the loaders' next batch end a step here: ranks "
            "and %%tpu_debug check whether XLA compiled again"
        ),
    },
    ("torch_xla.core.xla_model", "read"): {
        "_run_step_closures": "its frame: values that step closures read do not slow the loop"
    },
    ("torch_xla._internal.tpu", "read"): {
        "num_available_chips configure_one_chip_topology configure_topology": (
            "a rank's own chip: how many there are, and the environment that selects one"
        )
    },
    ("torch_xla._internal.pjrt", "read"): {
        "initialize_singleprocess": "a rank starts the runtime as torch_xla's own launcher does"
    },
    ("torch_xla.distributed.parallel_loader.MpDeviceLoader", "attribute"): {
        "_loader _parallel_loader": "the loader inside is replaced, in a copy"
    },
    ("torch_xla.distributed.parallel_loader.ParallelLoader", "attribute"): {
        "_loader_worker _cpu_loader _exception_queue": (
            "the thread that reads the data set, its loader, and the queue for its errors"
        )
    },
    ("torch", "read"): {
        "_is_functional_tensor _sync _from_functional_tensor": (
            "inside an XLA tensor is the tensor of the computation: for tpunb.log, which keeps a "
            "value without computing it, for SPMD's sharded tensors, and to overwrite a view"
        ),
        "_to_cpu": "copies a list of tensors to the CPU at once",
        "_foreach_copy_": "copies a list of tensors in one operation",
    },
    ("torch.Tensor", "attribute"): {
        "_version _is_view _use_count": (
            "whether a tensor was changed in place, is a view, or shares its memory"
        )
    },
    ("torch.UntypedStorage", "attribute"): {"_cdata": "the argument of _storage_Use_Count"},
    ("torch._C", "read"): {
        "_storage_Use_Count": (
            "whether XLA has released memory that it took over, so that the memory can be reused"
        )
    },
    ("torch.autograd.Variable", "attribute"): {
        "_execution_engine": (
            "every backward pass goes through its run_backward: the first is noticed"
        )
    },
    ("torch._ops", "read"): {"OpOverload": "the operators of a graph: which are collectives?"},
    ("torch._C._distributed_c10d.ProcessGroupGloo", "attribute"): {
        "_Options _allgather_base": (
            "gloo without a process group of the user's: large tensors of rehearsed collectives"
        )
    },
    ("torch_xla._dynamo.dynamo_bridge", "compiler"): {
        "extract_compiled_graph_helper": (
            "torch.compile: a graph with collectives is run by lazy tensors, all others as usual"
        )
    },
    ("torch.distributed.rendezvous", "meeting"): {
        "_rendezvous_handlers _create_c10d_store": (
            "the rendezvous of init_process_group: of xla://, and the store of env://"
        )
    },
    ("torch_xla._internal.pjrt", "launcher"): {
        "spawn run_multiprocess": (
            "torch_xla.launch and xmp.spawn end here, however they were imported"
        )
    },
    ("torch_xla.torch_xla", "launcher"): {
        "dist": "torch_xla.launch checks with it for torch elastic, to pass the local rank"
    },
    ("torch_xla.distributed.parallel_loader", "loader"): {
        "ParallelLoader": (
            "_loader_worker is replaced: an error in the data set silently ends the loop; "
            "next_item is timed, as below"
        )
    },
    ("torch.utils.data.dataloader", "loader"): {
        "_BaseDataLoaderIter": "__next__ is timed: how long the loop waits for its input"
    },
    ("accelerate.launchers", "launcher"): {
        "notebook_launcher": (
            "starts processes; accelerate and the user hold the function itself, so its code is "
            "replaced"
        )
    },
    ("torch_xla._internal.tpu", "identity"): {
        "num_available_devices": (
            "Lightning's accelerator='tpu' uses as many cores as this counts on the PCI bus"
        )
    },
    ("torch_xla.amp.autocast_mode", "identity"): {
        "xm": "torch_xla.amp.autocast checks with it whether the device is a TPU, and fails if not"
    },
}

# Lightning comes as one package, and as the two that it is made of. Checked with 2.6.
TRAINER = ("lightning.pytorch", "pytorch_lightning")
FABRIC = ("lightning.fabric", "lightning_fabric")
_LIGHTNING: Sequence[tuple[NameKind, str, str, str]] = (
    ("launcher", "strategies.launchers.xla", "_XLALauncher", "waits for a result of rank 0"),
    ("state", "strategies.ddp", "DDPStrategy", "_start_method: that of ddp_notebook forks more"),
    ("state", "strategies.xla", "XLAStrategy", "_launched: without it a strategy is rank 0 of 1"),
)
_LIGHTNING_FABRIC: Sequence[tuple[NameKind, str, str, str]] = (
    ("state", "strategies.xla_fsdp", "XLAFSDPStrategy", "as XLAStrategy"),
    ("state", "utilities.rank_zero", "rank_zero_only", "its rank is read at the import"),
    ("state", "accelerators.xla", "XLAAccelerator", "it caches the first count of devices"),
)
CONNECTORS = {
    **{
        f"{each}.trainer.connectors.accelerator_connector": "_AcceleratorConnector"
        for each in TRAINER
    },
    **{f"{name}.connector": "_Connector" for name in FABRIC},
}
"""Their methods `_check_device_config_and_set_final_flags`, which gets devices and num_nodes, and
`_choose_gpu_accelerator_backend` are replaced."""

NAMES: tuple[Name, ...] = (
    *(
        Name(owner, name, kind, why)
        for (owner, kind), names in _WHY.items()
        for joined, why in names.items()
        for name in joined.split()
    ),
    *(
        Name(f"{package}.{module}", name, kind, why)
        for packages, rows in (((*TRAINER, *FABRIC), _LIGHTNING), (FABRIC, _LIGHTNING_FABRIC))
        for package in packages
        for kind, module, name, why in rows
    ),
    *(Name(owner, name, "state", "counts 1 device") for owner, name in CONNECTORS.items()),
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
CREATE_TENSOR = "CreateXlaTensor"
CREATE_HANDLE = "CreateDataHandles"
"""Values on the device: results of programs, and values moved to the device."""
READ_TENSOR = "xla::_to_cpu"
READ_SCALAR = "aten::_local_scalar_dense"
"""Reads of values: of a tensor, and of a single number. torch_xla counts the second as an operator
that XLA lacks."""

STEP_CLOSURES = "_run_step_closures"
"""The function of torch_xla.sync() that runs step closures: they may read values."""
SHARDED = "_is_sharded"
"""An attribute of the parameters of XlaFullyShardedDataParallel: this rank holds a part of them."""
FSDP_SHARD = "_fsdp_shard"
"""In the names of these parameters, also in a state_dict."""
REDUCING = ("reduce_gradients", "all_reduce")
"""Public functions of torch_xla.core.xla_model that a step calls before the optimizer's step."""
