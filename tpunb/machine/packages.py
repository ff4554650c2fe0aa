"""Checks that the installed packages fit together, and names the command that repairs them.

Reads the packages' metadata and imports none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from tpunb.backends.choice import (
    TORCHTPU_SINCE,
    BackendChoice,
    Installed,
    choose,
    missing_libpython,
)
from tpunb.machine.machine import Machine
from tpunb.machine.problem import SetupProblem
from tpunb.utils.install_commands import UV_INSTALL


@dataclass(frozen=True)
class Pair:
    """A release of torch_xla, and the releases of other packages that work with it."""

    torch_xla: str
    torch: str
    torchvision: str
    torchaudio: str
    libtpu: str


# torch_xla and libtpu: the metadata of torch_xla on PyPI (extra [tpu]); torchvision and torchaudio:
# their requirements of torch. The newest first.
# Colab's TPU runtime has the first pair (googlecolab/backend-info a724079), Kaggle's the second
# (Kaggle/docker-python 78aaa43, which holds libtpu back at 0.0.17 after installing jax).
PAIRS = (
    Pair("2.9.0", "2.9.0", "0.24.0", "2.9.0", "0.0.21"),
    Pair("2.8.0", "2.8.0", "0.23.0", "2.8.0", "0.0.17"),
)
OF_KAGGLE = PAIRS[1]
TORCH_TPU = "0.2.0"
"""The release of torch_tpu that the next two constants are for: its metadata and its files."""
TORCH_OF_TORCHTPU = (TORCHTPU_SINCE, (2, 15))
"""First and last release of torch; without a TPU, TorchTPU is rehearsed with torch alone."""
LIBTPU_OF_TORCH_TPU = "0.0.50"
"""The oldest libtpu."""
SHOWN = ("torch", "torch_xla", "torch_tpu", "libtpu", "ipykernel", "tpunb")
OF_ONE_TORCH = ("torchvision", "torchaudio")
"""Packages of which each release is for one release of torch."""
WATCHED = (*SHOWN, *OF_ONE_TORCH, "numpy")
"""Packages that are checked."""


@dataclass(frozen=True)
class InstalledPackages:
    """An interpreter's packages, of those in `WATCHED`."""

    python: tuple[int, ...]
    versions: dict[str, str]
    requires: dict[str, tuple[str, ...]]
    """Requirements that the packages declare, as "torch==2.9.0", keyed by package."""

    def release(self, name: str) -> tuple[int, ...] | None:
        """Release numbers of a package, (2, 9, 0) for '2.9.0+cpu'; None if not installed."""
        return release_numbers(self.versions[name]) if name in self.versions else None

    def main_versions(self) -> dict[str, str]:
        """Versions of Python and of the packages in `SHOWN`, for display."""
        python = {"python": ".".join(map(str, self.python))}
        return python | {name: self.versions[name] for name in SHOWN if name in self.versions}


def read_installed(path: Sequence[str] | None = None) -> InstalledPackages:
    """Read the packages of this interpreter, or those in the folders of `path`."""
    versions: dict[str, str] = {}
    requires: dict[str, tuple[str, ...]] = {}
    folders = list(sys.path if path is None else path)
    for name in WATCHED:
        # Python imports the first one on the path.
        for distribution in metadata.distributions(name=name, path=folders):
            versions[name] = distribution.version
            requires[name] = tuple(distribution.requires or ())
            break
    return InstalledPackages(tuple(sys.version_info[:3]), versions, requires)


def release_numbers(version: str) -> tuple[int, ...]:
    """Release numbers of a version: (2, 9, 0) for '2.9.0+cpu' and '2.9.0rc1'; () if invalid."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).release
    except InvalidVersion:
        return ()


def pair_of(torch_xla: tuple[int, ...] | None) -> Pair | None:
    """The pair for a release of torch_xla, ignoring its last number; None if not known."""
    for pair in PAIRS:
        if torch_xla is not None and torch_xla[:2] == release_numbers(pair.torch_xla)[:2]:
            return pair
    return None


def best_pair(platform: str) -> Pair:
    """The pair to install: on Kaggle the image's own, elsewhere the newest."""
    return OF_KAGGLE if platform == "kaggle" else PAIRS[0]


def installed_backend(have: InstalledPackages) -> BackendChoice:
    """The backend that the installed packages are for."""
    names = have.versions
    torch = (have.release("torch") or ())[:2]
    return choose(None, None, Installed(torch, "torch_xla" in names, "torch_tpu" in names))


def install_command(pair: Pair, platform: str, *, tpu: bool, have: InstalledPackages) -> str:
    """The single command that installs a pair, and the packages that depend on torch's release."""
    wanted = [f"torch=={pair.torch}"]
    for name, version in (("torchvision", pair.torchvision), ("torchaudio", pair.torchaudio)):
        if name in have.versions:
            wanted.append(f"{name}=={version}")
    wanted.append(f"'torch_xla[tpu]=={pair.torch_xla}'" if tpu else f"torch_xla=={pair.torch_xla}")
    if platform == "kaggle" and tpu:
        wanted.append(f"libtpu=={pair.libtpu}")
    return " ".join([UV_INSTALL, *wanted])


def install_torch_command(have: InstalledPackages, machine: Machine) -> str:
    """The single command that installs torch for a backend without torch_xla, and torch_tpu for
    TorchTPU on a TPU, which a TPU is for where no torch is installed.
    """
    first, last = TORCH_OF_TORCHTPU
    wanted = [f"'torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}'"]
    wanted += [name for name in OF_ONE_TORCH if name in have.versions]
    install = UV_INSTALL
    if machine.chips and (machine.backend == "torchtpu" or "torch" not in have.versions):
        wanted.append(f"'torch_tpu>={TORCH_TPU}'")
    elif machine.gpus:
        again = "" if machine.cuda else " --reinstall-package torch"
        install = install.replace("--torch-backend=cpu", f"--torch-backend=auto{again}")
    return " ".join([install, *wanted])


def restart_step(platform: str) -> str:
    return {
        "colab": "Runtime > Restart session",
        "kaggle": "Run > Restart & clear cell outputs",
    }.get(platform, "restart the kernel")


def restart_hint(platform: str) -> str:
    """`restart_step` as the last of several steps."""
    return f"then {restart_step(platform)}"


# --- Problems with versions ---


def package_problems(
    have: InstalledPackages, machine: Machine, imported: Mapping[str, Any] | None = None
) -> Iterator[SetupProblem]:
    """Yield the problems of the installed packages.

    `imported`: the kernel's modules, which may be older than the installed files.
    """
    fix = f"`{_command(have, machine)}`, {restart_hint(machine.platform)}"
    torch = _pair(have, fix) if machine.backend == "xla" else _torch(have, machine, fix)
    mismatches = list(torch)
    yield from mismatches or _libtpu(have, machine)
    yield from _of_another_torch(have, fix)
    if imported is not None:
        yield from _imported(have, machine, imported)


def _torch(have: InstalledPackages, machine: Machine, fix: str) -> Iterator[SetupProblem]:
    """Check torch for a backend without torch_xla, and torch_tpu for TorchTPU on a TPU."""
    torch, torch_tpu = have.release("torch"), have.release("torch_tpu")
    first, last = TORCH_OF_TORCHTPU
    if torch is None:
        yield SetupProblem("torch-missing", "torch is not installed, and runs need it.", fix)
    elif machine.backend == "torch":
        if machine.chips and "torch_xla" in have.versions:  # torch was upgraded past torch_xla
            command = _command(have, replace(machine, backend="xla"))
            for problem in _pair(have, f"`{command}`, {restart_hint(machine.platform)}"):
                yield replace(problem, must=False)
        if machine.gpus and not machine.cuda:
            yield SetupProblem(
                "torch-without-cuda",
                f"this machine has a GPU, but torch {have.versions['torch']} was built for the CPU "
                "only, so runs use the CPU.",
                fix,
                must=False,
            )
    elif not first <= torch[:2] <= last:
        yield SetupProblem(
            "torch-release",
            f"TorchTPU {TORCH_TPU} works with torch {first[0]}.{first[1]} to {last[0]}.{last[1]}, "
            f"but torch {have.versions['torch']} is installed.",
            fix,
            must=bool(machine.chips) or torch[:2] < first,
        )
    elif machine.chips and (torch_tpu or ()) < release_numbers(TORCH_TPU)[:2]:
        installed = have.versions.get("torch_tpu")
        yield SetupProblem(
            "torch-tpu-release",
            f"TorchTPU needs torch_tpu {TORCH_TPU} or later on a TPU, but "
            f"{f'torch_tpu {installed}' if installed else 'no torch_tpu'} is installed.",
            fix,
        )


def _pair(have: InstalledPackages, fix: str) -> Iterator[SetupProblem]:
    """Check that torch and torch_xla have the same release: torch_xla is compiled against it."""
    torch, xla = have.release("torch"), have.release("torch_xla")
    if torch is None or xla is None:
        missing = " and ".join(name for name in ("torch", "torch_xla") if name not in have.versions)
        yield SetupProblem(
            "torch-xla-missing",
            f"{missing} {'are' if ' ' in missing else 'is'} not installed, and the backend xla "
            "needs both, of one release.",
            fix,
        )
    elif torch[:2] != xla[:2]:
        yield SetupProblem(
            "torch-pair",
            f"torch {have.versions['torch']} and torch_xla {have.versions['torch_xla']} do not "
            "belong together: torch_xla is compiled for one release of torch, and importing it "
            "with another fails with 'undefined symbol'.",
            fix,
        )
    elif pair_of(xla) is None:
        yield SetupProblem(
            "torch-xla-release",
            f"tpunb does not support torch_xla {have.versions['torch_xla']}, only "
            f"{', '.join(pair.torch_xla for pair in PAIRS)}.",
            fix,
            must=xla < release_numbers(PAIRS[-1].torch_xla),
        )
    elif library := missing_libpython():
        name, fix = library
        yield SetupProblem("libpython", f"torch_xla needs {name}, which is not installed.", fix)


def _libtpu(have: InstalledPackages, machine: Machine) -> Iterator[SetupProblem]:
    """Check that libtpu fits the library that loads it."""
    installed, found = have.release("libtpu"), have.versions.get("libtpu")
    pair = pair_of(have.release("torch_xla"))
    if machine.backend == "xla":
        if pair is None or not machine.chips:
            return
        fits = installed is not None and installed[:3] == release_numbers(pair.libtpu)
        command = install_command(pair, machine.platform, tpu=True, have=have)
        needs = f"torch_xla {have.versions['torch_xla']} works with libtpu {pair.libtpu}"
        without, otherwise = "would run on the CPU", "the TPU fails to start with a PJRT error"
    else:
        if "torch_tpu" not in have.versions:
            return
        new = installed is not None and installed >= release_numbers(LIBTPU_OF_TORCH_TPU)
        fits = new or (installed is not None and not machine.chips)
        command = f"{UV_INSTALL} 'libtpu>={LIBTPU_OF_TORCH_TPU}'"
        needs = (
            f"torch_tpu {have.versions['torch_tpu']} needs libtpu {LIBTPU_OF_TORCH_TPU} or later"
        )
        without, otherwise = "aborts when torch is imported", "the TPU fails to start"
    fix = f"`{command}`, {restart_hint(machine.platform)}"
    if installed is None:
        library = "torch_xla" if machine.backend == "xla" else "torch_tpu"
        yield SetupProblem(
            "libtpu-missing",
            f"libtpu, the library that drives the TPU, is not installed: {library} {without}.",
            fix,
        )
    elif not fits:
        yield SetupProblem(
            "libtpu-release",
            f"{needs}, but libtpu {found} is installed: {otherwise}. jax[tpu] installs its own "
            "libtpu: never upgrade libtpu or jax alone.",
            fix,
        )


def _of_another_torch(have: InstalledPackages, fix: str) -> Iterator[SetupProblem]:
    """Check torchvision and torchaudio, which load only with their own release of torch."""
    from packaging.requirements import Requirement

    for name in OF_ONE_TORCH:
        for need in map(Requirement, have.requires.get(name, ())):
            torch = have.versions.get("torch")
            if need.name != "torch" or torch is None:
                continue
            if not need.specifier.contains(torch, prereleases=True):
                # All together, so that all are built for the CPU, or all with CUDA.
                yield SetupProblem(
                    "needs-torch",
                    f"{name} {have.versions[name]} needs torch{need.specifier}, but torch {torch} "
                    f"is installed: importing {name} may fail.",
                    f"`pip uninstall -y torch torchvision torchaudio`, then {fix}",
                    must=False,
                )


def _imported(
    have: InstalledPackages, machine: Machine, imported: Mapping[str, Any]
) -> Iterator[SetupProblem]:
    """Check for packages that were replaced after this kernel had imported them."""
    for name in ("torch", "torch_xla", "numpy"):
        loaded = getattr(imported.get(name), "__version__", None)
        if loaded is None or name not in have.versions:
            continue
        if release_numbers(str(loaded)) != have.release(name):
            yield SetupProblem(
                "restart",
                f"this kernel has imported {name} {loaded}, but {name} {have.versions[name]} was "
                "installed since.",
                f"{restart_step(machine.platform)}: the kernel uses the old version until then",
                must=False,
            )


def _command(have: InstalledPackages, machine: Machine) -> str:
    too_old = machine.chips > 0 and not machine.vfio_chips and "torch" not in have.versions
    if machine.backend != "xla" and not too_old:
        return install_torch_command(have, machine)
    pair = best_pair(machine.platform)
    return install_command(pair, machine.platform, tpu=bool(machine.chips), have=have)
