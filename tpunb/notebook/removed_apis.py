"""Names, modules, variables and commands of older torch_xla releases, and their replacements.

The tables behind the warnings of `tpunb lint` and the rewrites of `tpunb migrate`. A test checks
each row against the installed torch_xla 2.9.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from tpunb.notebook.scopes import XM
from tpunb.utils.errors import UV_INSTALL

ApiState = Literal["missing", "deprecated", "refused", "ignored", "legacy"]


@dataclass(frozen=True)
class RemovedApi:
    """An API that notebooks from 2019 to 2024 use and that torch_xla 2.9 removed or replaced."""

    old: str
    """A full dotted name; in VARIABLES the variable, in COMMANDS a part of a shell line."""
    new: str | None
    """The full dotted name of the replacement; None if there is no direct successor."""
    state: ApiState
    """State in torch_xla 2.9. `missing`: removed, using it fails. `deprecated`: works and warns (a
    variable still has its effect). `refused`: exists, but raises for this use. `ignored`: has
    no effect. `legacy`: works without a warning; there is a better way."""
    advice: str
    """What to do, in one sentence."""
    since: str = ""
    """The release that brought it into this state, if known."""


XR = "torch_xla.runtime"
PL = "torch_xla.distributed.parallel_loader"
XMP = "torch_xla.distributed.xla_multiprocessing"
PJRT = "torch_xla.experimental.pjrt"
DP = "torch_xla.distributed.data_parallel"
SPMD = "torch_xla.distributed.spmd"
_LOOP = "Write an ordinary loop over `torch_xla.distributed.parallel_loader.MpDeviceLoader`."
_BF16 = (
    "Write `model.to(torch.bfloat16)`, or `with torch.autocast('xla', dtype=torch.bfloat16):` "
    "around the forward pass and the loss."
)

_LAUNCH = "Write `torch_xla.launch(fn, args=(...))`"
_PJRT_ONLY = "Leave it out: PJRT is the only runtime."
_ON_EACH_HOST = (
    "Run the script on each host: `gcloud compute tpus tpu-vm ssh NAME --worker=all "
    "--command='python3 train.py'`."
)


def _now(old: str, new: str, state: ApiState, call: str, note: str = "") -> RemovedApi:
    """The row of a name that another one replaces: what to write, and a remark."""
    return RemovedApi(old, new, state, f"Write `{call}`{note}.")


def _gone(old: str, advice: str, state: ApiState = "missing", *, since: str = "") -> RemovedApi:
    """The row of a name without a successor."""
    return RemovedApi(old, None, state, advice, since)


_NO_ARGUMENT = ", which takes no argument"
_OF_RUNTIME: tuple[tuple[str, str, ApiState], ...] = (
    ("xrt_world_size", "world_size", "missing"),
    ("get_ordinal", "global_ordinal", "missing"),
    ("get_local_ordinal", "local_ordinal", "legacy"),
)
NAMES: tuple[RemovedApi, ...] = (
    _now(f"{XM}.xla_device", "torch_xla.device", "deprecated", "torch_xla.device()"),
    _now(f"{XM}.mark_step", "torch_xla.sync", "deprecated", "torch_xla.sync()"),
    *(
        _now(f"{XM}.{old}", f"{XR}.{new}", state, f"{XR}.{new}()", _NO_ARGUMENT)
        for old, new, state in _OF_RUNTIME
    ),
    _gone(
        f"{XM}.parse_xla_device",
        "Use `device.index` of a `torch.device`, or `xla_model.xla_device_hw(device)`.",
    ),
    _gone(f"{XM}.XlaModel", _LOOP),
    _gone(f"{XM}.get_log_fn", "Print with `xla_model.master_print`."),
    _gone(f"{XM}.category_eval_fn", "Compute the accuracy in the loop itself."),
    RemovedApi(f"{XMP}.spawn", "torch_xla.launch", "legacy", f"{_LAUNCH}; it uses all devices."),
    RemovedApi(
        f"{PL}.ParallelLoader",
        f"{PL}.MpDeviceLoader",
        "legacy",
        "Write `MpDeviceLoader(loader, device)`, which can be looped over again each epoch.",
    ),
    RemovedApi(
        f"{DP}.DataParallel",
        "torch_xla.launch",
        "legacy",
        "It drives devices from threads of one process, and a process has one device now: put "
        "the loop in a function and start it with `torch_xla.launch(fn)`.",
    ),
    RemovedApi(
        "torch_xla.amp.autocast",
        "torch.autocast",
        "legacy",
        "Write `torch.autocast('xla', dtype=torch.bfloat16)`; the old form fails off TPU.",
    ),
    _gone(
        "torch_xla.amp.GradScaler",
        "Leave it out: bfloat16 has the range of float32, so that losses need no scaling.",
        since="2.9",
    ),
    _now("torch_xla.experimental.compile", "torch_xla.compile", "missing", "torch_xla.compile"),
    _gone(f"{XR}.using_pjrt", _PJRT_ONLY),
    _gone(f"{PJRT}.using_pjrt", _PJRT_ONLY),
    _now(f"{PJRT}.rendezvous", f"{XM}.rendezvous", "missing", "xla_model.rendezvous(tag)"),
    _now(
        f"{PJRT}.broadcast_master_param",
        f"{XM}.broadcast_master_param",
        "missing",
        "xla_model.broadcast_master_param(model)",
    ),
    RemovedApi(f"{PJRT}.spawn", "torch_xla.launch", "missing", f"{_LAUNCH}."),
    RemovedApi(f"{PJRT}.spawn_threads", "torch_xla.launch", "missing", f"{_LAUNCH}."),
)
"""Single names. Names in the modules of MODULES count as well: see `lookup_name`."""

MODULES: tuple[RemovedApi, ...] = (
    *(
        RemovedApi(f"torch_xla_py.{old}", new, "missing", f"Import `{new}`.")
        for old, new in (
            ("xla_model", XM),
            ("data_parallel", DP),
            ("parallel_loader", PL),
            ("xla_multiprocessing", XMP),
            ("utils", "torch_xla.utils.utils"),
            ("keyd_queue", "torch_xla.utils.keyd_queue"),
            ("graph_saver", "torch_xla.debug.graph_saver"),
            ("model_comparator", "torch_xla.debug.model_comparator"),
        )
    ),
    RemovedApi("torch_xla_py", "torch_xla", "missing", "Import `torch_xla`."),
    RemovedApi(PJRT, XR, "missing", f"Import `{XR}`."),
    RemovedApi(
        "torch_xla.experimental.tpu",
        "torch_xla._internal.tpu",
        "missing",
        "Import `torch_xla._internal.tpu`, which is not public.",
    ),
    *(
        RemovedApi(
            f"torch_xla.experimental.{name}", f"{SPMD}.{name}", "missing", f"Import `{SPMD}`."
        )
        for name in ("xla_sharding", "xla_sharded_tensor")
    ),
    RemovedApi(
        "torch_xla.experimental.pjrt_backend",
        "torch_xla.distributed.xla_backend",
        "legacy",
        "Import `torch_xla.distributed.xla_backend`, and write `xla://` for `pjrt://`. On a TPU v2 "
        "or v3 use one core: there the old module patches torch.distributed for the threads of a "
        "process, which neither torchrun nor a rank of tpunb has.",
    ),
    _gone("torch_xla.distributed.xla_dist", _ON_EACH_HOST),
    _gone(
        "torch_xla.distributed.cluster",
        "Read the hosts with `gcloud compute tpus tpu-vm describe NAME`.",
    ),
    _gone("torch_xla.distributed.worker", "Leave it out."),
    _gone("torch_xla.distributed._worker", "Leave it out."),
    _gone(
        "torch_xla.utils.tf_record_reader",
        "Read TFRecord files with tensorflow or the package tfrecord.",
    ),
    _gone("torch_xla.utils.gcsfs", "Use the package gcsfs."),
    _gone("torch_xla.utils.cached_dataset", "Cache the data set yourself."),
)
"""Modules; a row also stands for every name in the module that is not in NAMES."""

VARIABLES: tuple[RemovedApi, ...] = (
    RemovedApi(
        "XRT_TPU_CONFIG", "PJRT_DEVICE", "ignored", "Leave it out: a TPU is detected automatically."
    ),
    _gone("XRT_", "Leave it out: the XRT runtime is gone.", "ignored"),
    _gone(
        "COLAB_TPU_ADDR", "Leave it out: a TPU is part of the machine that the notebook runs on."
    ),
    _gone("XLA_USE_BF16", _BF16, "deprecated"),
    _gone("XLA_DOWNCAST_BF16", _BF16, "deprecated"),
    _gone("XLA_USE_FP16", _BF16, "ignored"),
    _gone("XLA_DOWNCAST_FP16", _BF16, "ignored"),
    RemovedApi(
        "XLA_USE_SPMD",
        f"{XR}.use_spmd",
        "deprecated",
        "Write `torch_xla.runtime.use_spmd()` before the first tensor.",
    ),
    _gone("XLA_TENSOR_ALLOCATOR_MAXSIZE", "Leave it out.", "ignored"),
)
"""Environment variables. A name that ends with an underscore is a prefix."""

INSTALL_PAIR = f"`{UV_INSTALL} torch==2.9.0 'torch_xla[tpu]==2.9.0'`"
_PAIR = f"{INSTALL_PAIR}; Colab and Kaggle have a pair installed."

COMMANDS: tuple[RemovedApi, ...] = (
    _gone("env-setup.py", f"Install a pair that fits: {_PAIR}"),
    _gone("xla_dist", _ON_EACH_HOST),
    _gone("cloud-tpu-client", f"Leave it out; for torch_xla itself: {_PAIR}", "ignored"),
    _gone("cloud_tpu_client", f"Leave it out; for torch_xla itself: {_PAIR}", "ignored"),
    _gone("tpu-pytorch/wheels", f"These wheels are too old: {_PAIR}", "refused"),
    _gone("torch_xla-1.", f"This wheel is too old: {_PAIR}", "refused"),
    _gone("torch_xla-nightly", f"This wheel is too old: {_PAIR}", "refused"),
    _gone("torch_xla[tpuvm]", f"The extra is named `tpu` now: {_PAIR}"),
)
"""Parts of shell lines by which an outdated command is recognised."""

ADDRESS_GONE = "TPU nodes are gone, and with them their addresses: the TPU is in this machine."
_ADDRESS = re.compile(
    r"\btpu_worker;\d+;|\bgrpc://(?:\d+(?:\.\d+){3}:8470|[${(]*\w*tpu|(?P<open>\Z))", re.IGNORECASE
)

_BY_NAME = {row.old: row for row in NAMES}


def is_node_address(text: str, around: str) -> bool:
    """True if a text is the address of a TPU node: `tpu_worker;0;10.0.0.2:8470`, `grpc://$TPU_ADDR`.

    `grpc://` alone counts if the code around it, which supplies the rest, mentions a TPU.
    """
    match = _ADDRESS.search(text)
    return match is not None and (match["open"] is None or "tpu" in around.lower())


def lookup_name(name: str) -> RemovedApi | None:
    """Return the row for a full dotted name, with `new` followed to a current name.

    A name inside a module of MODULES gets a row of its own. None if the name is current.
    """
    row = _BY_NAME.get(name) or _in_module(name)
    if row is None or row.new is None or (next_row := lookup_name(row.new)) is None:
        return row
    return replace(row, new=next_row.new, advice=next_row.advice)


def _in_module(name: str) -> RemovedApi | None:
    for row in MODULES:
        if name == row.old:
            return row
        if name.startswith(f"{row.old}."):
            new = row.new and row.new + name[len(row.old) :]
            return replace(row, old=name, new=new, advice=f"Write `{new}`." if new else row.advice)
    return None


def lookup_variable(name: str) -> RemovedApi | None:
    """Return the row for an environment variable; None if the variable is current."""
    for row in VARIABLES:
        if name == row.old or (row.old.endswith("_") and name.startswith(row.old)):
            return row
    return None
