"""Names, modules, variables and commands of older torch_xla releases, and their replacements.

The tables behind the warnings of `tpunb lint`. A test checks each row against the installed
torch_xla 2.9.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tpunb.backends.xla import restored_names
from tpunb.backends.xla.restored_names import PJRT, XM, XMP, XR
from tpunb.utils.errors import UV_INSTALL

ApiState = Literal["missing", "restored", "deprecated", "refused", "ignored", "legacy"]


@dataclass(frozen=True)
class RemovedApi:
    """An API that notebooks from 2019 to 2024 use and that torch_xla 2.9 removed or replaced."""

    old: str
    """A full dotted name; in VARIABLES the variable, in COMMANDS a part of a shell line."""
    new: str | None
    """The full dotted name of the replacement; None if there is no direct successor."""
    state: ApiState
    """State in torch_xla 2.9. `missing`: removed, using it fails. `restored`: removed, but a run of
    tpunb has it again (`backends.xla.restored_names`). `deprecated`: works and warns (a
    variable still has its effect). `refused`: exists, but raises for this use. `ignored`: has
    no effect. `legacy`: works without a warning; there is a better way."""
    advice: str
    """What to do, in one sentence."""
    since: str = ""
    """The release that brought it into this state, if known."""


PL = "torch_xla.distributed.parallel_loader"
DP = "torch_xla.distributed.data_parallel"
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


def _now(old: str, new: str, state: ApiState, call: str) -> RemovedApi:
    """The row of a name that another one replaces: what to write."""
    return RemovedApi(old, new, state, f"Write `{call}`.")


def _gone(old: str, advice: str, state: ApiState = "missing", *, since: str = "") -> RemovedApi:
    """The row of a name without a successor."""
    return RemovedApi(old, None, state, advice, since)


NAMES: tuple[RemovedApi, ...] = (
    _now(f"{XM}.xla_device", "torch_xla.device", "deprecated", "torch_xla.device()"),
    _now(f"{XM}.mark_step", "torch_xla.sync", "deprecated", "torch_xla.sync()"),
    _now(f"{XM}.get_local_ordinal", f"{XR}.local_ordinal", "legacy", f"{XR}.local_ordinal()"),
    *(
        _now(old, new, "restored", new + ("" if passed else "()"))
        for old, (new, passed) in restored_names.NAMES.items()
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
    _gone(f"{XR}.using_pjrt", _PJRT_ONLY),
    _gone(f"{PJRT}.using_pjrt", _PJRT_ONLY),
)
"""Single names. Names in the modules of MODULES count as well: see `lookup_name`."""

MODULES: tuple[RemovedApi, ...] = (
    *(
        RemovedApi(old, new, "restored", f"Import `{new}`.")
        for old, new in sorted(restored_names.MODULES.items(), reverse=True)
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

_BY_NAME = {row.old: row for row in NAMES}


def lookup_name(name: str) -> RemovedApi | None:
    """Return the row for a full dotted name, with `new` followed to a current name.

    A name inside a module of MODULES gets a row of its own. None if the name is current.
    """
    row = _BY_NAME.get(name) or _in_module(name)
    if row is None or row.new is None or (next_row := lookup_name(row.new)) is None:
        return row
    state = "missing" if next_row.state == "missing" else row.state
    return replace(row, new=next_row.new, state=state, advice=next_row.advice)


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
