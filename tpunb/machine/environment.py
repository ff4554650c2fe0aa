"""The environment of a run: the kernel's, with variables added and removed, each with a reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpunb.backends.choice import is_installed
from tpunb.backends.torchtpu.loading import AUTOLOAD
from tpunb.backends.xla import spmd, topology
from tpunb.machine import tpu
from tpunb.machine.machine import Machine
from tpunb.runs.spec import THREAD_VARIABLES, BackendName, Device
from tpunb.utils import env_vars, secrets

_RANK_VARIABLES = tuple(
    "CPU_NUM_DEVICES GROUP_RANK GROUP_WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR "
    "MASTER_PORT PJRT_LOCAL_PROCESS_COUNT PJRT_LOCAL_PROCESS_RANK RANK ROLE_NAME ROLE_RANK "
    "ROLE_WORLD_SIZE TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RESTART_COUNT TORCHELASTIC_RUN_ID "
    "TORCHELASTIC_USE_AGENT_STORE WORLD_SIZE".split()
)
# They choose the chip of one process. torch_xla keeps variables that are set (os.environ.setdefault
# in 2.9, _internal/tpu.py), so every rank would get the same chip.
_CHIP_VARIABLES = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")
_WITH_ONE_CHIP = ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS")
"""Set by torch_xla together with a chip, in a kernel that used the TPU itself."""
_KEPT = "torch_xla would keep it in every rank"
_OF_XLA = ("PJRT_DEVICE", spmd.VARIABLE)
_OF_HOST_PROCESS = (
    "CLOUD_TPU_TASK_ID",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_PORT",
    *_WITH_ONE_CHIP,
)
"""They describe one process for each host, as Kaggle, LeaderWorkerSet and KubeRay set them."""
_TOPOLOGY = "TORCH_TPU_TOPOLOGY"
LAUNCH_VARIABLES = ("TORCH_TPU_SLICEBUILDER_ADDRESSES", _TOPOLOGY, "TORCH_TPU_XPROF_SESSION_ID")
"""Set by torch_tpu's `set_tpu_launch_env`, once for each run; they name ports that were free."""
_METRICS_PORTS = "TPU_RUNTIME_METRICS_PORTS"
"""Read by libtpu; without it, all processes of a host would serve port 8431."""
_PINNING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""With these, each process would pin its threads to the same processors, the first ones."""
_AT_IMPORT = (
    *("PYTHON", "LD_", "TORCH_", "ATEN_", "MALLOC_", "GLIBC_"),
    *(env_vars.BACKEND, env_vars.DEVICE),
)
"""Prefixes of variables that are read when the interpreter starts or torch is imported.

Variables of XLA, PJRT and libtpu are not among them: they are read when a rank starts the runtime.
Importing torch_xla or scikit-learn in the kernel sets some (XLA_FLAGS, KMP_INIT_AT_FORK), which
must not cost a warm fork server. Neither are `LAUNCH_VARIABLES`, which torch_tpu 0.2 reads when a
rank first uses the device.
"""


@dataclass(frozen=True)
class EnvChange:
    """A variable in which a run's environment differs from the kernel's."""

    name: str
    value: str | None
    """None if the variable is removed."""
    reason: str


def environment_changes(
    env: Mapping[str, str],
    device: Device,
    machine: Machine | None = None,
    backend: BackendName = "xla",
) -> list[EnvChange]:
    """Changes that turn the kernel's environment into that of a run on this device.

    `machine`: the machine of the run; without it, changes that depend on its TPU are left out.
    For TorchTPU on a TPU, `backends.torchtpu.launch_variables` adds what differs from run to run.
    """
    changes = [EnvChange("PYTHONUNBUFFERED", "1", "output of child processes appears at once")]
    if backend == "xla":
        changes.insert(0, EnvChange("PJRT_DEVICE", device, "the device of the ranks"))
    of_one = _of_one_chip(env) if device == "TPU" else []
    for names, reason in (
        (_RANK_VARIABLES, "set by another launcher; every rank gets its own"),
        (_PINNING, "it would pin all ranks to the same processors"),
        (of_one, "for a single process; every rank gets its own chip"),
    ):
        changes += [EnvChange(name, None, reason) for name in names if name in env]
    if backend == "xla":
        changes += _of_torch_xla(env, device, machine, of_one)
    else:
        changes += _without_torch_xla(env, device, machine, backend, of_one)
    changes += _of_libraries(env)
    return [change for change in changes if env.get(change.name) != change.value]


def _of_torch_xla(
    env: Mapping[str, str], device: Device, machine: Machine | None, of_one: list[str]
) -> Iterator[EnvChange]:
    left = {name: value for name, value in env.items() if name not in of_one}
    if device == "TPU" or env.get("TPU_PROCESS_ADDRESSES") == "local":
        for name, value in topology.changes(left).items():
            yield EnvChange(
                name, value, _KEPT if value is None else "the host's, for all its ranks"
            )
    if device == "TPU" and machine is not None:
        yield from _on_a_tpu(left, machine)


def _without_torch_xla(
    env: Mapping[str, str],
    device: Device,
    machine: Machine | None,
    backend: BackendName,
    of_one: list[str],
) -> Iterator[EnvChange]:
    # In a slice of several hosts, only a topology from outside describes all of it.
    outside = _TOPOLOGY if machine is not None and machine.workers > 1 else None
    of_launch = [name for name in LAUNCH_VARIABLES if name != outside]
    for names, reason in (
        (_OF_XLA, f"for torch_xla, which the backend {backend} does not use"),
        (
            set(_OF_HOST_PROCESS) - set(of_one),
            "for a single process on each host; a rank is a process",
        ),
        (of_launch, "of another launch; every run gets its own"),
    ):
        yield from (EnvChange(name, None, reason) for name in names if name in env)
    if device == "TPU" and machine is not None:
        yield from _metrics_ports(env, machine)
    if device != "TPU" and (backend == "torchtpu" or is_installed("torch_tpu")):
        why = "torch_tpu takes seconds to load, has no TPU here, and excludes a rehearsed one"
        yield EnvChange(AUTOLOAD, "0", why)
    if "USE_TORCH_XLA" not in env and is_installed("torch_xla"):
        why = "accelerate and transformers would use torch_xla, which the run does not"
        yield EnvChange("USE_TORCH_XLA", "0", why)


def _of_one_chip(env: Mapping[str, str]) -> list[str]:
    chip = [name for name in _CHIP_VARIABLES if name in env]
    return chip + [name for name in _WITH_ONE_CHIP if chip and name in env]


def _on_a_tpu(env: Mapping[str, str], machine: Machine) -> Iterator[EnvChange]:
    named = machine.accelerator_type
    label = env.get("TPU_ACCELERATOR_TYPE", "")
    if "TPU_TOPOLOGY" in env and tpu.parse_accelerator_type(named) and label != named:
        why = "the name that torch_xla knows, derived from GKE's label and TPU_TOPOLOGY"
        yield EnvChange("TPU_ACCELERATOR_TYPE", named, why)
        env = {**env, "TPU_ACCELERATOR_TYPE": named}
    for name, value in tpu_topology(env, machine).items():
        yield EnvChange(name, value, "from the PCI bus; no metadata server gives the topology")
    yield from _metrics_ports(env, machine)
    if env_vars.XLA_CACHE not in env and "XLA_PERSISTENT_CACHE_PATH" not in env:
        folder = cache_folder(env, machine)
        yield EnvChange(
            env_vars.XLA_CACHE,
            str(folder),
            "cache of compiled programs (to disable it: =off)",
        )


def _metrics_ports(env: Mapping[str, str], machine: Machine) -> Iterator[EnvChange]:
    processes = machine.chips * (machine.devices_per_chip if machine.backend == "torchtpu" else 1)
    if processes > 1 and _METRICS_PORTS not in env:
        ports = ",".join(str(8431 + number) for number in range(processes))
        why = "each chip's process serves its load and memory on its own port, as on GKE"
        yield EnvChange(_METRICS_PORTS, ports, why)


def _of_libraries(env: Mapping[str, str]) -> Iterator[EnvChange]:
    if "inline" in env.get("MPLBACKEND", "") or "ipympl" in env.get("MPLBACKEND", ""):
        yield EnvChange(
            "MPLBACKEND", "Agg", "ranks draw into files, of which the cell shows rank 0's"
        )
    if "TQDM_MININTERVAL" not in env:  # tqdm reads it since 4.66; its own default is 0.1
        yield EnvChange(
            "TQDM_MININTERVAL", "0.5", "seconds between updates of ranks' progress bars"
        )


def tpu_topology(env: Mapping[str, str], machine: Machine) -> dict[str, str]:
    """Variables to add because torch_xla gets the topology neither from `env` nor from the
    metadata server; {} if it does, and for hosts of larger slices.
    """
    if not machine.chips or machine.workers > 1:
        return {}
    if not env.get("TPU_SKIP_MDS_QUERY") and "ACCELERATOR_TYPE" in machine.metadata.tpu_env:
        return {}
    known = tpu.topology_variables(machine.accelerator_type, machine.chips)
    return {name: value for name, value in known.items() if not env.get(name)}


def cache_folder(env: Mapping[str, str], machine: Machine) -> Path:
    """The user's folder of compiled programs for this generation of TPU."""
    base = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME", "~")).expanduser() / ".cache")
    return Path(base) / "tpunb" / "xla" / machine.generation.replace(" ", "-")


def run_environment(
    env: Mapping[str, str],
    device: Device,
    extra: Mapping[str, str] | None = None,
    machine: Machine | None = None,
    backend: BackendName = "xla",
) -> dict[str, str]:
    """Return the environment of a run. `extra`: the user's variables (`--env`)."""
    made = dict(env)
    for change in environment_changes(env, device, machine, backend):
        if change.value is None:
            del made[change.name]
        else:
            made[change.name] = change.value
    if backend != "xla":
        made |= {env_vars.BACKEND: backend, env_vars.DEVICE: device}
    made.update(extra or {})
    return made


def fork_server_environment(env: Mapping[str, str]) -> dict[str, str]:
    """A run's environment without the numbers of threads, for the fork server.

    OpenMP and BLAS libraries use all processors in it. The run's processes set their own numbers,
    so that a later run of the same fork server can have others.
    """
    return {name: value for name, value in env.items() if name not in THREAD_VARIABLES}


def read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that a warm fork server can no longer change."""
    return {
        name: value
        for name, value in env.items()
        if name.startswith(_AT_IMPORT) and name not in LAUNCH_VARIABLES
    }


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """The environment for `env.json`: without values that may be secret."""
    return {name: secrets.kept_value(name, value) for name, value in sorted(env.items())}


# --- One process that drives all cores, in torch_xla's SPMD mode ---

_DEVICES = "CPU_NUM_DEVICES"
"""Number of devices of a process on CPU; torch_xla reads it when its runtime starts."""


@dataclass(frozen=True)
class SpmdEnvironment:
    why: str
    """Why the run is an SPMD run: 'cell [3] calls use_spmd()'."""
    cores: int
    """Cores that the process drives."""
    changes: tuple[EnvChange, ...]
    """Differences from the kernel's environment."""
    env: Mapping[str, str]
    """The run's environment."""


def spmd_environment(
    kernel: Mapping[str, str],
    asked: Mapping[str, str],
    machine: Machine,
    cores: int,
    cells: str | None,
) -> SpmdEnvironment | None:
    """The environment of an SPMD run; None if the run has one process for each core.

    `kernel`: the kernel's environment. `asked`: variables of `--env`; XLA_USE_SPMD among them
    decides. `cells`: the reason for SPMD found in the run's cells.
    """
    why = _why(kernel, asked, cells)
    if why is None:
        return None
    if machine.device == "TPU" and machine.devices_per_chip > 1:
        # --cores counts ranks, and an SPMD run has one rank.
        cores = machine.chips * machine.devices_per_chip
    found = {change.name: change for change in environment_changes(kernel, machine.device, machine)}
    if machine.device == "CPU":
        found[_DEVICES] = EnvChange(_DEVICES, str(cores), "SPMD: the cores that one process drives")
    elif cores > 1:
        # Keep them: platforms set them for one process with all chips of a host.
        for name in topology.changes(kernel).keys() - set(_of_one_chip(kernel)):
            found.pop(name, None)
    if why == cells:  # SPMD is off before these cells run, as it was in the kernel
        found[spmd.VARIABLE] = EnvChange(spmd.VARIABLE, None, "the run's cells switch SPMD on")
    changes = [change for change in found.values() if kernel.get(change.name) != change.value]
    values = {**kernel, **{change.name: change.value for change in changes}, **asked}
    env = {name: value for name, value in values.items() if value is not None}
    return SpmdEnvironment(why, cores, tuple(changes), env)


def _why(kernel: Mapping[str, str], asked: Mapping[str, str], cells: str | None) -> str | None:
    if spmd.VARIABLE in asked:
        on = spmd.is_on(asked)
        return f"--env {spmd.VARIABLE}={asked[spmd.VARIABLE]}" if on else None
    if cells is None and spmd.is_on(kernel):
        return f"{spmd.VARIABLE} is set in the kernel's environment"
    return cells


def refused_variables(asked: Mapping[str, str], machine: Machine) -> str | None:
    """Explain why variables of `--env` cannot be used; None if they can."""
    if asked.get("PJRT_DEVICE") == "TPU" and not machine.chips:
        return (
            "PJRT_DEVICE=TPU: there is no TPU on this machine's PCI bus. Without it, the run is a "
            "rehearsal on the CPU"
        )
    if machine.device == "CPU" and asked.get(_DEVICES, "1") != "1":
        return (
            f"{_DEVICES}={asked[_DEVICES]}: a rehearsal rank has one device, and the process of an "
            "SPMD run has --cores devices. Several devices in one rank, which torch_xla drives "
            "from threads as on a TPU v2 or v3, cannot be rehearsed"
        )
    return None
