"""The environment of a run: the kernel's, with what must be added or removed, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpunb.models import THREAD_VARIABLES, Device

_RANK_VARIABLES = (
    "CPU_NUM_DEVICES",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PJRT_LOCAL_PROCESS_COUNT",
    "PJRT_LOCAL_PROCESS_RANK",
    "RANK",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "WORLD_SIZE",
)

_AT_IMPORT = ("PYTHON", "LD_", "TORCH_", "ATEN_", "MALLOC_", "GLIBC_")
"""Prefixes of variables that are read when the interpreter starts or torch is imported.

Not those of XLA, PJRT and libtpu: they are read when a rank starts the runtime. Importing
torch_xla or scikit-learn in the kernel sets some (XLA_FLAGS, KMP_INIT_AT_FORK), which must not
cost a warm agent.
"""


@dataclass(frozen=True)
class Change:
    """One difference between the kernel's environment and that of a run."""

    name: str
    value: str | None
    """None: removed."""
    reason: str


def changes(env: Mapping[str, str], device: Device) -> list[Change]:
    """What a run's environment must have, or must not have, on this device."""
    found = [
        Change("PJRT_DEVICE", device, "the device of the ranks"),
        Change("PYTHONUNBUFFERED", "1", "what child processes print is seen at once"),
    ]
    found += [
        Change(name, None, "left from another launcher; every rank gets its own")
        for name in _RANK_VARIABLES
        if name in env
    ]
    if env.get("TPU_PROCESS_ADDRESSES") == "local":
        for name in ("TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID"):
            if name in env:
                found.append(Change(name, None, "torch_xla would keep it in every rank"))
    if "inline" in env.get("MPLBACKEND", "") or "ipympl" in env.get("MPLBACKEND", ""):
        found.append(Change("MPLBACKEND", "Agg", "a rank has no notebook to draw into"))
    return [change for change in found if env.get(change.name) != change.value]


def for_run(
    env: Mapping[str, str], device: Device, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """A new dict: the environment of a run. `extra` is what the person asked for (`--env`)."""
    made = dict(env)
    for change in changes(env, device):
        if change.value is None:
            del made[change.name]
        else:
            made[change.name] = change.value
    made.update(extra or {})
    return made


def for_agent(env: Mapping[str, str]) -> dict[str, str]:
    """A run's environment for the agent: with one thread for OpenMP and the BLAS libraries.

    After an OpenMP parallel region in a process, its forked children hang or crash in one
    (measured with torch 2.9 and scikit-learn); ranks get their own number of threads.
    """
    return {**env, **dict.fromkeys(THREAD_VARIABLES, "1")}


def read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that an agent which is already warm cannot change any more."""
    return {name: value for name, value in env.items() if name.startswith(_AT_IMPORT)}


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """For `env.json`: values of variables that may hold a secret are left out."""
    words = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "AUTH", "COOKIE")
    return {
        name: "(not kept)" if any(word in name.upper() for word in words) else value
        for name, value in sorted(env.items())
    }
