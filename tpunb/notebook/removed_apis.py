"""Names and modules that torch_xla 2.9 no longer has, and what to write instead.

A test checks each row against the installed torch_xla 2.9.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tpunb.backends.xla import restored_names
from tpunb.backends.xla.restored_names import PJRT, XM, XR


@dataclass(frozen=True)
class RemovedApi:
    """An API that notebooks from 2019 to 2024 use and that torch_xla 2.9 does not have."""

    old: str
    """A full dotted name."""
    new: str | None
    """The full dotted name of the replacement; None if there is no direct successor."""
    state: Literal["missing", "restored"]
    """`missing`: using it fails. `restored`: a run of tpunb has it again
    (`backends.xla.restored_names`)."""
    advice: str
    """What to do, in one sentence."""
    since: str = ""
    """The release that removed it, if that is known."""


_LOOP = "Write an ordinary loop over `torch_xla.distributed.parallel_loader.MpDeviceLoader`."
_PJRT_ONLY = "Leave it out: PJRT is the only runtime."


def _gone(old: str, advice: str, *, since: str = "") -> RemovedApi:
    """The row of a name without a successor."""
    return RemovedApi(old, None, "missing", advice, since)


NAMES: tuple[RemovedApi, ...] = (
    *(
        RemovedApi(old, new, "restored", f"Write `{new}{'' if passed else '()'}`.")
        for old, (new, passed) in restored_names.NAMES.items()
    ),
    _gone(
        f"{XM}.parse_xla_device",
        "Use `device.index` of a `torch.device`, or `xla_model.xla_device_hw(device)`.",
    ),
    _gone(f"{XM}.XlaModel", _LOOP),
    _gone(f"{XM}.get_log_fn", "Print with `xla_model.master_print`."),
    _gone(f"{XM}.category_eval_fn", "Compute the accuracy in the loop itself."),
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
    _gone(
        "torch_xla.distributed.xla_dist",
        "Run the script on each host: `gcloud compute tpus tpu-vm ssh NAME --worker=all "
        "--command='python3 train.py'`.",
    ),
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
