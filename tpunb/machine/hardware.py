"""Finds problems with the device: a TPU that is missing, incomplete or in use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from tpunb.backends.torchtpu.loading import AUTOLOAD
from tpunb.machine import environment, tpu
from tpunb.machine.machine import Machine
from tpunb.machine.problem import SetupProblem
from tpunb.machine.tpu_users import TpuUsers

_DOWNCASTS = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")


def hardware_problems(
    machine: Machine, holding: TpuUsers, env: Mapping[str, str], root: Path, cores: int
) -> Iterator[SetupProblem]:
    """Yield all problems with the device, the most severe first. `cores`: ranks of a run."""
    if machine.backend == "xla":
        yield from _device_of_xla(machine, env)
    elif machine.backend == "torchtpu":
        yield from _device_of_torchtpu(machine, env, root)
    elif machine.chips:
        yield SetupProblem(
            "tpu-not-used",
            f"this machine has {machine.chips} TPU chips, but the backend torch does not use them.",
            "use the backend torchtpu or xla to train on the TPU",
            must=False,
        )
    if machine.device == "CPU" and not machine.chips and (how := _get_a_tpu(machine)):
        yield SetupProblem(
            "no-tpu-runtime",
            f"{machine.kind}: this machine has no TPU, so runs are rehearsals on the CPU.",
            how,
            must=False,
        )
    if machine.device == "TPU" and machine.chips:
        yield from _files(machine, root)
        yield from _held(holding)
        yield from _slice(machine, cores)
        if machine.backend == "xla":
            yield from _topology(machine, env)
    if machine.backend == "xla":
        yield from _variables(env)


def _device_of_torchtpu(
    machine: Machine, env: Mapping[str, str], root: Path
) -> Iterator[SetupProblem]:
    if (why := machine.why_not_torchtpu()) is not None:
        yield SetupProblem(
            "torchtpu-generation",
            f"{why}.",
            "use the backend xla, with torch 2.9 and torch_xla 2.9",
        )
    elif machine.chips and not machine.vfio_chips and tpu.device_files(root):
        yield SetupProblem(
            "torchtpu-device-files",
            "torch_tpu opens a chip through /dev/vfio/N, where N is its IOMMU group, and finds "
            f"none of this machine's {machine.chips} TPU chips there: runs are rehearsals on the "
            "CPU.",
            "start a container with `--privileged --net=host`; on a VM whose image has "
            "/dev/accel* instead, choose an image with /dev/vfio, or use the backend xla",
        )
    elif machine.chips and not machine.vfio_chips:
        yield from _files(machine, root)
    if machine.device == "TPU":
        yield from _loading(env)


def _loading(env: Mapping[str, str]) -> Iterator[SetupProblem]:
    """Check how torch_tpu is loaded, and the allocator that it wants."""
    if env.get(AUTOLOAD) == "0":
        yield SetupProblem(
            "autoload",
            f"{AUTOLOAD} is 0, so `import torch` does not load torch_tpu: code without "
            "`import torch_tpu` has no device 'tpu'.",
            f"unset {AUTOLOAD}, and restart the kernel",
            must=False,
        )
    if "tcmalloc" not in env.get("LD_PRELOAD", ""):
        yield SetupProblem(
            "tcmalloc",
            "tcmalloc is not loaded. torch_tpu warns that the host's part of a step is slower "
            "without it.",
            "`sudo apt-get install -y google-perftools`, and start Jupyter with "
            "LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
            must=False,
        )


def _device_of_xla(machine: Machine, env: Mapping[str, str]) -> Iterator[SetupProblem]:
    wanted = env.get("PJRT_DEVICE", "")
    if wanted not in ("", "CPU", "TPU"):
        yield SetupProblem(
            "pjrt-device",
            f"PJRT_DEVICE is {wanted}, but runs of tpunb use a TPU, or the CPU for rehearsals.",
            "unset PJRT_DEVICE, or set it to TPU or CPU",
            must=False,
        )
    if wanted == "TPU" and not machine.chips:
        yield SetupProblem(
            "no-tpu",
            "PJRT_DEVICE is TPU, but there is no TPU on this machine's PCI bus.",
            _get_a_tpu(machine) or "unset PJRT_DEVICE: runs are then rehearsals on the CPU",
        )
    elif wanted == "CPU" and machine.chips:
        yield SetupProblem(
            "tpu-not-used",
            f"this machine has {machine.chips} TPU chips, but PJRT_DEVICE=CPU keeps runs off them.",
            "unset PJRT_DEVICE (`del os.environ['PJRT_DEVICE']`) to train on the TPU",
            must=False,
        )


def _get_a_tpu(machine: Machine) -> str:
    return {
        "colab": "for a TPU: Runtime > Change runtime type > v5e-1 TPU or v6e-1 TPU",
        "kaggle": "for a TPU: Settings > Accelerator > TPU v5e-8 (the session restarts)",
    }.get(machine.platform, "")


def _files(machine: Machine, root: Path) -> Iterator[SetupProblem]:
    """Check the chips' device files, which a container may lack."""
    files = tpu.device_files(root)
    if not files:
        yield SetupProblem(
            "no-device-files",
            f"{machine.chips} TPU chips are on the PCI bus, but their device files (/dev/accel* "
            "or /dev/vfio/*) are missing: this container was started without them.",
            "start the container with `--privileged --net=host` (GKE: request `google.com/tpu` "
            "in the pod's resources)",
        )
        return
    closed = [path for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        yield SetupProblem(
            "device-files-closed",
            f"this user cannot open {len(closed)} of the TPU's {len(files)} device files: "
            f"{closed[0]}{', …' if len(closed) > 1 else ''}.",
            f"`sudo chmod a+rw {' '.join(map(str, closed))}`, or work as a user who can open them",
        )


def _held(holding: TpuUsers) -> Iterator[SetupProblem]:
    for holder in holding.holders:
        if not (holder.kind == "run" and holder.living):
            yield SetupProblem("tpu-held", f"the TPU is held by {holder.describe()}.", holder.fix())
    living = [holder for holder in holding.holders if holder.kind == "run" and holder.living]
    for name in sorted({holder.name for holder in living}):
        first = next(holder for holder in living if holder.name == name)
        yield SetupProblem(
            "tpu-in-use",
            f"run {Path(name).name} is using the TPU; the next run waits for it.",
            first.fix(),
            must=False,
        )
    if holding.lock == "forbidden" and not holding.holders:
        unseen = (
            f" (the open files of {holding.unreadable} processes of other users cannot be read)"
            if holding.unreadable
            else ""
        )
        yield SetupProblem(
            "lock-file",
            f"{holding.lock_file} belongs to {holding.lock_user} and cannot be opened, so libtpu "
            f"takes the TPU to be in use, whether or not it is{unseen}.",
            "look for processes that use the TPU with `sudo lsof -w /dev/accel* /dev/vfio/*`; if "
            f"there is none, `sudo rm {holding.lock_file}`",
        )


def _slice(machine: Machine, cores: int) -> Iterator[SetupProblem]:
    parsed = tpu.parse_accelerator_type(machine.accelerator_type)
    xla = machine.backend == "xla"
    if xla and machine.devices_per_chip > 1:
        yield SetupProblem("two-devices", f"{machine.why_one_rank()}.", "`--cores 1`", must=False)
    if xla and machine.generation == "v7x":
        yield SetupProblem(
            "v7x",
            "torch_xla 2.9 knows TPU v7x by name only, so runs may fail; TorchTPU supports it.",
            "use the backend torchtpu, with torch 2.11 or later and torch_tpu, or a TPU v4, v5e, "
            "v5p or v6e",
            must=False,
        )
    alone = min(machine.rank_counts, default=1)
    if machine.workers > 1 and cores > alone:
        fix = f"`%tpu_setup --cores {alone}`"
        yield SetupProblem("pod", f"{machine.why_this_host_alone()}.", fix)
    elif machine.workers == 1 and parsed is not None and parsed[1] > machine.chips:
        yield SetupProblem(
            "chips-missing",
            f"a {machine.accelerator_type} has {parsed[1]} chips, but this machine shows "
            f"{machine.chips}: it is either one host of several, without the variables that name "
            "the others, or a container with only some of the chips.",
            "set TPU_WORKER_HOSTNAMES and TPU_WORKER_ID on every host, or give the container "
            "all chips",
        )


def _topology(machine: Machine, env: Mapping[str, str]) -> Iterator[SetupProblem]:
    """Check whether torch_xla can find out the topology without the metadata server's answer."""
    if not environment.needs_topology(env, machine):
        return
    state = machine.metadata.state
    why = (
        "has no tpu-env (404)"
        if state == "answers"
        else {
            "stalls": "does not answer in time",
            "refuses": "refuses connections",
            "unknown name": "has no address on this machine",
            "not Google's": "is not Google's",
        }.get(state, "was not queried")
    )
    if environment.tpu_topology(env, machine):
        yield SetupProblem(
            "metadata",
            f"the metadata server, which torch_xla queries for the TPU's topology, {why}. Runs "
            f"get it from their environment instead ({machine.accelerator_type}, one host).",
            "nothing to do for runs; for other programs set TPU_SKIP_MDS_QUERY=1 and the "
            "variables that `%%tpu_train --dry-run` lists",
            must=False,
        )
    else:
        yield SetupProblem(
            "topology",
            "the TPU's topology is not known: the metadata server "
            f"{why}, and not all of the variables TPU_ACCELERATOR_TYPE, TPU_HOST_BOUNDS, "
            "TPU_CHIPS_PER_HOST_BOUNDS and TPU_WORKER_ID are set. torch_xla fails with 'Failed to "
            "get TPU metadata', or waits.",
            "start the container with --net=host, or set TPU_SKIP_MDS_QUERY=1 and those variables",
        )


def _variables(env: Mapping[str, str]) -> Iterator[SetupProblem]:
    for name in _DOWNCASTS:
        if env.get(name, "0") not in ("", "0"):
            yield SetupProblem(
                "downcast",
                f"{name} is set: torch_xla computes in bfloat16 although the tensors' types still "
                "read float32, and will stop doing so in a later release.",
                f"unset {name}, and use `model.to(torch.bfloat16)` or "
                "`torch.autocast('xla', dtype=torch.bfloat16)`",
                must=False,
            )
    retired = sorted(name for name in environment.RETIRED if name in env)
    if retired:
        yield SetupProblem(
            "retired-variables",
            f"{', '.join(retired)}: only torch_xla before 2.0 reads "
            f"{'them' if len(retired) > 1 else 'it'}, and runs do not get "
            f"{'them' if len(retired) > 1 else 'it'}.",
            "remove the lines that set them from the notebook; PJRT_DEVICE=TPU has replaced them, "
            "and tpunb sets it for runs",
            must=False,
        )
