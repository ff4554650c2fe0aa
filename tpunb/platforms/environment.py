"""The environment of a run: the kernel's, with what must be added or removed, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpunb.models import THREAD_VARIABLES, Device
from tpunb.platforms import chips
from tpunb.platforms.machine import Machine

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
# Of one process and its chip: torch_xla keeps what is set (os.environ.setdefault), so every
# rank would have the same one. 2.9, _internal/tpu.py.
_CHIP_VARIABLES = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "TPU_PROCESS_PORT")
_WITH_ONE_CHIP = ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS")
"""Beside one of those: what torch_xla has set in a kernel that used the TPU itself."""
_PINNING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""Each process would pin its threads to the same processors, the first ones."""
RETIRED = (
    "COLAB_TPU_ADDR",
    "TPU_IP_ADDRESS",
    "XRT_DEVICE_MAP",
    "XRT_HOST_ORDINAL",
    "XRT_LOCAL_WORKER",
    "XRT_MESH_SERVICE_ADDRESS",
    "XRT_MULTI_PROCESSING_DEVICE",
    "XRT_SHARD_ORDINAL",
    "XRT_SHARD_WORLD_SIZE",
    "XRT_TPU_CONFIG",
    "XRT_WORKERS",
)
"""Variables of XRT and of TPU nodes, which torch_xla has not read since 2.0 or so."""

_AT_IMPORT = ("PYTHON", "LD_", "TORCH_", "ATEN_", "MALLOC_", "GLIBC_")
"""Prefixes of variables that are read when the interpreter starts or torch is imported.

Not those of XLA, PJRT and libtpu: they are read when a rank starts the runtime. Importing
torch_xla or scikit-learn in the kernel sets some (XLA_FLAGS, KMP_INIT_AT_FORK), which must not
cost a warm agent.
"""
CACHE = "TPUNB_XLA_CACHE"
"""Where ranks on a TPU keep what was compiled, a folder each; 'off': nowhere."""


@dataclass(frozen=True)
class Change:
    """One difference between the kernel's environment and that of a run."""

    name: str
    value: str | None
    """None: removed."""
    reason: str


def changes(env: Mapping[str, str], device: Device, here: Machine | None = None) -> list[Change]:
    """What a run's environment must have, or must not have, on this device.

    `here` is the machine, where it matters: what a TPU needs besides is only known of one.
    """
    found = [
        Change("PJRT_DEVICE", device, "the device of the ranks"),
        Change("PYTHONUNBUFFERED", "1", "what child processes print is seen at once"),
    ]
    found += [
        Change(name, None, "left from another launcher; every rank gets its own")
        for name in _RANK_VARIABLES
        if name in env
    ]
    found += [
        Change(name, None, "of TPU nodes and XRT, which are gone")
        for name in RETIRED
        if name in env
    ]
    found += [
        Change(name, None, "it would pin all ranks to the same processors")
        for name in _PINNING
        if name in env
    ]
    if env.get("TPU_PROCESS_ADDRESSES") == "local":
        for name in ("TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID"):
            if name in env:
                found.append(Change(name, None, "torch_xla would keep it in every rank"))
    if device == "TPU":
        of_one = [name for name in _CHIP_VARIABLES if name in env]
        of_one += [name for name in _WITH_ONE_CHIP if of_one and name in env]
        found += [
            Change(name, None, "of one process; every rank gets its own chip") for name in of_one
        ]
        if here is not None:
            left = {name: value for name, value in env.items() if name not in of_one}
            found += _on_a_tpu(left, here)
    found += _of_libraries(env)
    return [change for change in found if env.get(change.name) != change.value]


def _on_a_tpu(env: Mapping[str, str], here: Machine) -> Iterator[Change]:
    for name, value in topology(env, here).items():
        yield Change(name, value, "no metadata server says how the chips lie; from the PCI bus")
    if CACHE not in env and "XLA_PERSISTENT_CACHE_PATH" not in env:
        folder = cache_folder(env, here)
        yield Change(CACHE, str(folder), "what was compiled once is not compiled again (off: =off)")


def _of_libraries(env: Mapping[str, str]) -> Iterator[Change]:
    if "inline" in env.get("MPLBACKEND", "") or "ipympl" in env.get("MPLBACKEND", ""):
        yield Change("MPLBACKEND", "Agg", "a rank has no notebook to draw into")
    if "TQDM_MININTERVAL" not in env:  # tqdm reads it since 4.66; its own default is 0.1
        yield Change("TQDM_MININTERVAL", "0.5", "ranks' bars are shown so often, and logged")


def needs_topology(env: Mapping[str, str], here: Machine) -> bool:
    """Whether torch_xla would ask a metadata server that cannot tell it how the chips lie."""
    if not here.chips:
        return False
    if env.get("TPU_SKIP_MDS_QUERY"):
        return not all(
            any(name in env for name in names)
            for names in (
                ("TPU_ACCELERATOR_TYPE",),
                ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS"),
                ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"),
                ("CLOUD_TPU_TASK_ID", "TPU_WORKER_ID"),
            )
        )
    return "ACCELERATOR_TYPE" not in here.metadata.tpu_env


def topology(env: Mapping[str, str], here: Machine) -> dict[str, str]:
    """The variables to add where torch_xla cannot know how the chips lie; {} if it can."""
    if not needs_topology(env, here) or here.workers > 1:
        return {}
    known = chips.topology(here.accelerator_type, here.chips)
    return {name: value for name, value in known.items() if not env.get(name)}


def cache_folder(env: Mapping[str, str], here: Machine) -> Path:
    """Where compiled programs are kept: they fit one generation of TPU, and are the user's."""
    base = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME", "~")).expanduser() / ".cache")
    return Path(base) / "tpunb" / "xla" / here.generation.replace(" ", "-")


def for_run(
    env: Mapping[str, str],
    device: Device,
    extra: Mapping[str, str] | None = None,
    here: Machine | None = None,
) -> dict[str, str]:
    """A new dict: the environment of a run. `extra` is what the person asked for (`--env`)."""
    made = dict(env)
    for change in changes(env, device, here):
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
