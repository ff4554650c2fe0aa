"""Checks that the installed packages fit together, and names the command that repairs them.

Reads the packages' metadata. Only `import_problem` imports packages, in a separate process.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from tpunb.backends.choice import TORCHTPU_SINCE, BackendChoice, Installed, choose, is_installed
from tpunb.machine.machine import Machine
from tpunb.machine.problem import SetupProblem
from tpunb.utils.errors import UV_INSTALL


@dataclass(frozen=True)
class Pair:
    """A release of torch_xla, and the releases of other packages that work with it."""

    torch_xla: str
    torch: str
    torchvision: str
    torchaudio: str
    libtpu: str
    jax: str
    """For Pallas kernels."""
    pythons: tuple[tuple[int, int], tuple[int, int]]
    """First and last Python with wheels."""


# torch_xla and libtpu, jax, Python: the metadata and the wheels of torch_xla on PyPI (extras
# [tpu] and [pallas]); torchvision and torchaudio: their requirements of torch. The newest first.
# Colab's TPU runtime has the first pair (googlecolab/backend-info a724079), Kaggle's the second
# (Kaggle/docker-python 78aaa43, which holds libtpu back at 0.0.17 after installing jax).
PAIRS = (
    Pair("2.9.0", "2.9.0", "0.24.0", "2.9.0", "0.0.21", "0.7.1", ((3, 10), (3, 13))),
    Pair("2.8.0", "2.8.0", "0.23.0", "2.8.0", "0.0.17", "0.6.2", ((3, 10), (3, 13))),
)
OF_KAGGLE = PAIRS[1]
TORCH_TPU = "0.2.0"
"""The release of torch_tpu that the next four lines are for: its metadata and its files."""
TORCH_OF_TORCHTPU = (TORCHTPU_SINCE, (2, 15))
"""First and last release of torch; without a TPU, TorchTPU is rehearsed with torch alone."""
LIBTPU_OF_TORCH_TPU = "0.0.50"
"""The oldest libtpu."""
PYTHON_OF_TORCH_TPU = (3, 11)
"""The oldest Python."""
SHOWN = ("torch", "torch_xla", "torch_tpu", "libtpu", "ipykernel", "tpunb")
WATCHED = (
    *SHOWN,
    *"ipython jax jaxlib libtpu-nightly numpy protobuf tensorflow tensorflow-cpu".split(),
    *"tensorflow-tpu torch_xla_cuda_plugin torchaudio torchvision transformers".split(),
)
"""Packages that are checked."""


@dataclass(frozen=True)
class InstalledPackages:
    """Versions and requirements of an interpreter's packages, of those in `WATCHED`."""

    python: tuple[int, ...]
    versions: dict[str, str]
    requires: dict[str, tuple[str, ...]]
    """Requirements that the packages declare, keyed by package."""

    def release(self, name: str) -> tuple[int, ...] | None:
        """Release numbers of a package, (2, 9, 0) for '2.9.0+cpu'; None if not installed."""
        return release_numbers(self.versions[name]) if name in self.versions else None

    def main_versions(self) -> dict[str, str]:
        """Versions of Python and of the packages in `SHOWN`, for display."""
        python = {"python": ".".join(map(str, self.python))}
        return python | {name: self.versions[name] for name in SHOWN if name in self.versions}


def read_installed(
    path: Sequence[str] | None = None, python: tuple[int, ...] = ()
) -> InstalledPackages:
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
    return InstalledPackages(python or tuple(sys.version_info[:3]), versions, requires)


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


def best_pair(platform: str, python: tuple[int, ...]) -> Pair | None:
    """The pair to install: on Kaggle the image's own, elsewhere the newest for this Python."""
    for pair in (OF_KAGGLE,) if platform == "kaggle" else PAIRS:
        if pair.pythons[0] <= python[:2] <= pair.pythons[1]:
            return pair
    return None


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
    return " ".join([_uv_install(platform), *wanted])


def _uv_install(platform: str) -> str:
    hosted = platform in ("colab", "kaggle")
    return UV_INSTALL.replace("--python python3", "--system") if hosted else UV_INSTALL


def install_torch_command(have: InstalledPackages, machine: Machine) -> str:
    """The single command that installs torch for a backend without torch_xla, and torch_tpu for
    TorchTPU on a TPU, which a TPU is for where no torch is installed.
    """
    first, last = TORCH_OF_TORCHTPU
    wanted = [f"'torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}'"]
    wanted += [name for name in ("torchvision", "torchaudio") if name in have.versions]
    install = _uv_install(machine.platform)
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


def unmet_requirement(requirement: str, have: InstalledPackages) -> str | None:
    """The part of a requirement that the installed package does not meet; None if it is met.

    Requirements of extras, for other machines, and of unwatched packages are skipped.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        parsed = Requirement(requirement)
    except InvalidRequirement:
        return None
    python = ".".join(map(str, have.python[:2]))
    if parsed.marker and not parsed.marker.evaluate({"extra": "", "python_version": python}):
        return None
    version = have.versions.get(parsed.name.replace("-", "_")) or have.versions.get(parsed.name)
    if version is None or parsed.specifier.contains(version, prereleases=True):
        return None
    clauses = sorted(parsed.specifier, key=str)
    failed = next(clause for clause in clauses if not clause.contains(version, prereleases=True))
    return f"{parsed.name}{failed}"


# --- Problems with versions ---


def package_problems(
    have: InstalledPackages,
    machine: Machine,
    env: Mapping[str, str],
    imported: Mapping[str, Any] | None = None,
) -> Iterator[SetupProblem]:
    """Yield the problems of the installed packages.

    `imported`: the kernel's modules, which may be older than the installed files.
    """
    if _lacks_wheels(have, machine):
        yield _python(have, machine)
        return
    xla = machine.backend == "xla"
    mismatches = list(_pair(have, machine) if xla else _torch(have, machine))
    yield from mismatches
    if not mismatches:
        yield from _libtpu(have, machine, env)
    yield from _two_backends(have, machine)
    if xla:
        yield from _plugins(have)
        yield from _tensorflow(have, machine)
    yield from _requirements(have, machine)
    if imported is not None:
        yield from _imported(have, machine, imported)


def half_installed(machine: Machine, have: InstalledPackages) -> Iterator[SetupProblem]:
    """Yield packages that pip lists but that cannot be found: an installation was cut short."""
    for name in ("torch", "torch_xla", "torch_tpu"):
        if name in have.versions and not is_installed(name):
            yield SetupProblem(
                "half-installed",
                f"pip lists {name} {have.versions[name]}, but there is no module {name}: its "
                "installation was interrupted, or its files were deleted.",
                reinstall_hint(machine, have),
            )


def reinstall_hint(machine: Machine, have: InstalledPackages) -> str:
    """The fix for packages with missing or broken files."""
    return f"`{_command(have, machine)} --force-reinstall`, {restart_hint(machine.platform)}"


def _lacks_wheels(have: InstalledPackages, machine: Machine) -> bool:
    if machine.backend == "xla":
        return best_pair(machine.platform, have.python) is None
    needs_torch_tpu = machine.backend == "torchtpu" and machine.chips > 0
    return needs_torch_tpu and have.python[:2] < PYTHON_OF_TORCH_TPU


def _python(have: InstalledPackages, machine: Machine) -> SetupProblem:
    if machine.backend == "xla":
        pair = OF_KAGGLE if machine.platform == "kaggle" else PAIRS[0]
        first, last = (".".join(map(str, python)) for python in pair.pythons)
        which = f"torch_xla {pair.torch_xla} has wheels for Python {first} to {last} only"
    else:
        last = ".".join(map(str, PYTHON_OF_TORCH_TPU))
        which = f"torch_tpu {TORCH_TPU} needs Python {last} or later"
    return SetupProblem(
        "python",
        f"this is Python {'.'.join(map(str, have.python[:2]))}, but {which}.",
        f"create an environment with another, e.g. `python{last} -m venv DIR`, and run in "
        f"it `{_command(have, machine)}`",
    )


def _torch(have: InstalledPackages, machine: Machine) -> Iterator[SetupProblem]:
    """Check torch for a backend without torch_xla, and torch_tpu for TorchTPU on a TPU."""
    fix = f"`{_command(have, machine)}`, {restart_hint(machine.platform)}"
    torch, torch_tpu = have.release("torch"), have.release("torch_tpu")
    first, last = TORCH_OF_TORCHTPU
    releases = f"torch {first[0]}.{first[1]} to {last[0]}.{last[1]}"
    if torch is None:
        yield SetupProblem("torch-missing", "torch is not installed, and runs need it.", fix)
    elif machine.backend == "torch":
        if machine.chips and "torch_xla" in have.versions:  # torch was upgraded past torch_xla
            for problem in _pair(have, replace(machine, backend="xla")):
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
            f"TorchTPU {TORCH_TPU} works with {releases}, but torch {have.versions['torch']} is "
            "installed.",
            fix,
            must=bool(machine.chips) or torch[:2] < first,
        )
    elif machine.chips and torch_tpu is None:
        yield SetupProblem(
            "torch-tpu-missing",
            "torch_tpu is not installed, and TorchTPU needs it on a TPU: without it, torch has no "
            "device 'tpu'.",
            fix,
        )
    elif torch_tpu is not None and torch_tpu < release_numbers(TORCH_TPU)[:2]:
        yield SetupProblem(
            "torch-tpu-release",
            f"tpunb supports torch_tpu {TORCH_TPU} and later, but torch_tpu "
            f"{have.versions['torch_tpu']} is installed.",
            fix,
            must=bool(machine.chips),
        )


def _pair(have: InstalledPackages, machine: Machine) -> Iterator[SetupProblem]:
    """Check that torch and torch_xla have the same release: torch_xla is compiled against it."""
    fix = f"`{_command(have, machine)}`, {restart_hint(machine.platform)}"
    torch, xla = have.release("torch"), have.release("torch_xla")
    if xla is None and torch is not None and torch[:2] >= TORCH_OF_TORCHTPU[0]:
        yield SetupProblem(
            "torch-xla-missing",
            "torch_xla is not installed, and the backend xla needs it, with another torch. The "
            f"backends torchtpu and torch work with torch {have.versions['torch']}.",
            f"for xla only: {fix}",
        )
    elif torch is None or xla is None:
        missing = " and ".join(name for name in ("torch", "torch_xla") if name not in have.versions)
        yield SetupProblem(
            "torch-xla-missing",
            f"{missing} {'are' if ' ' in missing else 'is'} not installed, and runs need both.",
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


def _libtpu(
    have: InstalledPackages, machine: Machine, env: Mapping[str, str]
) -> Iterator[SetupProblem]:
    """Check that libtpu fits the library that loads it."""
    owner = "torch_xla" if machine.backend == "xla" else "torch_tpu"
    pair = pair_of(have.release("torch_xla"))
    if owner not in have.versions or (owner == "torch_xla" and (not machine.chips or pair is None)):
        return
    # Not PTXLA_TPU_LIBRARY_PATH, which importing torch_xla sets to the installed libtpu.
    path = env.get("TPU_LIBRARY_PATH")
    if path and not Path(path).is_file():
        yield SetupProblem(
            "libtpu-path",
            f"TPU_LIBRARY_PATH names {path}, which does not exist.",
            "unset it (`del os.environ['TPU_LIBRARY_PATH']`, or in the shell that started "
            f"Jupyter): {owner} finds the installed libtpu by itself",
        )
    if path:
        return  # the user has chosen another libtpu than the installed one
    if pair is not None and owner == "torch_xla":
        command = install_command(pair, machine.platform, tpu=True, have=have)
    else:
        command = f"{_uv_install(machine.platform)} 'libtpu>={LIBTPU_OF_TORCH_TPU}'"
    fix = f"`{command}`, {restart_hint(machine.platform)}"
    without = "would run on the CPU" if owner == "torch_xla" else "aborts when torch is imported"
    if "libtpu-nightly" in have.versions and "libtpu" in have.versions:
        yield SetupProblem(
            "libtpu-twice",
            "libtpu and libtpu-nightly are both installed, and overwrite each other's files.",
            f"`pip uninstall -y libtpu libtpu-nightly`, then {fix}",
        )
    elif "libtpu" not in have.versions:
        yield SetupProblem(
            "libtpu-missing",
            f"libtpu, the library that drives the TPU, is not installed: {owner} {without}.",
            fix,
        )
    elif machine.chips and (why := _other_libtpu(have, machine, pair)):
        yield SetupProblem("libtpu-release", why, fix)


def _other_libtpu(have: InstalledPackages, machine: Machine, pair: Pair | None) -> str | None:
    """Explain why the installed libtpu does not fit torch_xla, or torch_tpu; None if it does."""
    installed = have.release("libtpu") or ()
    if machine.backend != "xla":
        if installed >= release_numbers(LIBTPU_OF_TORCH_TPU):
            return None
        return (
            f"torch_tpu {have.versions['torch_tpu']} needs libtpu {LIBTPU_OF_TORCH_TPU} or later, "
            f"but libtpu {have.versions['libtpu']} is installed. jax[tpu] installs its own libtpu."
        )
    if pair is None or installed[:3] == release_numbers(pair.libtpu):
        return None
    alone = " Never upgrade libtpu or jax alone." if machine.platform == "kaggle" else ""
    return (
        f"torch_xla {have.versions['torch_xla']} works with libtpu {pair.libtpu}, but libtpu "
        f"{have.versions['libtpu']} is installed: the TPU fails to start with a PJRT error. "
        f"jax[tpu] installs its own libtpu.{alone}"
    )


def _two_backends(have: InstalledPackages, machine: Machine) -> Iterator[SetupProblem]:
    """Check for torch_xla and torch_tpu in one environment: one of them is broken."""
    torch = have.release("torch")
    if torch is None or not {"torch_xla", "torch_tpu"} <= have.versions.keys():
        return
    old = torch[:2] < TORCH_OF_TORCHTPU[0]
    unwanted = {"xla": "torch_tpu", "torchtpu": "torch_xla"}.get(machine.backend)
    unwanted = unwanted or ("torch_tpu" if old else "torch_xla")
    broken = (
        "torch_tpu is broken: `import torch` loads it, and fails"
        if old
        else "torch_xla is broken: importing it fails with 'undefined symbol'"
    )
    yield SetupProblem(
        "torch-tpu",
        f"torch_xla {have.versions['torch_xla']} and torch_tpu {have.versions['torch_tpu']} are "
        f"both installed, and need another torch and another libtpu each. With torch "
        f"{have.versions['torch']}, {broken}.",
        f"`pip uninstall -y {unwanted}`, then "
        f"`{_command(have, machine)}`, {restart_hint(machine.platform)}",
        must=old or machine.backend == "xla",
    )


def _plugins(have: InstalledPackages) -> Iterator[SetupProblem]:
    """Check for another release of the plugin that torch_xla loads."""
    plugin, xla = have.release("torch_xla_cuda_plugin"), have.release("torch_xla")
    if plugin is not None and xla is not None and plugin[:2] != xla[:2]:
        yield SetupProblem(
            "pjrt-plugin",
            f"torch_xla_cuda_plugin {have.versions['torch_xla_cuda_plugin']} does not fit "
            f"torch_xla {have.versions['torch_xla']}, which loads it: PJRT API versions differ.",
            "`pip uninstall -y torch_xla_cuda_plugin`: runs of tpunb use a TPU or the CPU",
        )


def _tensorflow(have: InstalledPackages, machine: Machine) -> Iterator[SetupProblem]:
    """Check for a TensorFlow that conflicts with torch_xla in one process."""
    on_tpu = bool(machine.chips)
    for name in ("tensorflow", "tensorflow-tpu"):
        if name not in have.versions or "torch_xla" not in have.versions:
            continue
        what = (
            "loses the TPU to TensorFlow, or aborts"
            if on_tpu
            else "can abort: both register the same protobuf messages"
        )
        yield SetupProblem(
            "tensorflow",
            f"{name} {have.versions[name]} is installed: a process that imports both it and "
            f"torch_xla (transformers and tensorboard import it) {what}.",
            f"`pip uninstall -y {name}` and, if you need TensorFlow, `pip install tensorflow-cpu`, "
            f"{restart_hint(machine.platform)}; or set USE_TF=0 for transformers",
            must=on_tpu,
        )


def _requirements(have: InstalledPackages, machine: Machine) -> Iterator[SetupProblem]:
    """Check the requirements that watched packages declare of each other, and numpy's release."""
    torch, numpy = have.release("torch"), have.release("numpy")
    if torch is not None and numpy is not None and numpy >= (2,) and torch < (2, 3):
        yield SetupProblem(
            "numpy",
            f"torch {have.versions['torch']} was built for numpy 1, but numpy "
            f"{have.versions['numpy']} is installed: `tensor.numpy()` raises 'Numpy is not "
            "available'.",
            f"`pip install 'numpy<2'`, {restart_hint(machine.platform)}",
        )
    for name, needs in have.requires.items():
        for need in needs:
            if name == "torch_tpu" and need.startswith(("torch>", "libtpu>")):
                continue  # checked above
            if (part := unmet_requirement(need, have)) is not None:
                yield _unmet(name, part, have, machine)


def _unmet(name: str, part: str, have: InstalledPackages, machine: Machine) -> SetupProblem:
    other = part.partition("=")[0].rstrip("<>!~")
    installed = have.versions.get(other) or have.versions.get(other.replace("-", "_"), "")
    if name in ("torchvision", "torchaudio") and other == "torch":
        # Reinstall all three together, so that all are built for the CPU, or all with CUDA.
        fix = f"`pip uninstall -y torch torchvision torchaudio`, then `{_command(have, machine)}`"
    else:
        fix = f"`pip install '{part}'`, if nothing else needs {other} {installed} (`pip check`)"
    return SetupProblem(
        f"needs-{other.lower().replace('_', '-')}",
        f"{name} {have.versions[name]} needs {part}, but {other} {installed} is installed: "
        f"importing {name} may fail.",
        f"{fix}, {restart_hint(machine.platform)}",
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
    pair = best_pair(machine.platform, have.python)
    if pair is None:
        pair = OF_KAGGLE if machine.platform == "kaggle" else PAIRS[0]
    return install_command(pair, machine.platform, tpu=bool(machine.chips), have=have)


# --- Importing them ---

IMPORT_TIMEOUT = 120.0
"""Seconds. The import takes 7 s on two idle processors, and starts no device."""


def import_problem(
    env: Mapping[str, str], machine: Machine, have: InstalledPackages, sys_path: Sequence[str] = ()
) -> SetupProblem | None:
    """Import what the machine's backend needs in a subprocess with a run's environment; return the
    problem if it fails.

    `sys_path`: folders to put in front of the subprocess's `sys.path`.
    """
    needs_torch_tpu = machine.backend == "torchtpu" and machine.device == "TPU"
    more = ", torch_xla" if machine.backend == "xla" else ", torch_tpu" * needs_torch_tpu
    tried = f"import torch{more}"
    code = f"import sys; sys.path[:0] = {list(sys_path)!r}; {tried}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=dict(env),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=IMPORT_TIMEOUT,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return SetupProblem(
            "import-hangs",
            f"`{tried}` has not finished after {IMPORT_TIMEOUT:.0f} s.",
            "find out where it waits: `python -X faulthandler -X importtime -c '" + tried + "'`",
        )
    if done.returncode == 0:
        return None
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
    return SetupProblem(
        "import-fails",
        f"`{tried}` fails in a new process ({how}): {last[0].strip() if last else 'no message'}",
        reinstall_hint(machine, have),
    )
