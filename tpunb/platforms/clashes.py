"""What is wrong with the packages that are installed here, and the command that mends it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tpunb.platforms import versions
from tpunb.platforms.machine import Machine
from tpunb.platforms.problem import Problem
from tpunb.platforms.versions import Installed


def problems(
    have: Installed,
    here: Machine,
    env: Mapping[str, str],
    imported: Mapping[str, Any] | None = None,
) -> Iterator[Problem]:
    """All of them. `imported`: the modules of the kernel, which may be older than the files."""
    pair = versions.best_pair(here.platform, have.python)
    if pair is None:
        yield _python(have, here)
        return
    found = list(_pair(have, here))
    yield from found
    if not found:
        yield from _libtpu(have, here, env)
    yield from _plugins(have, here, env)
    yield from _tensorflow(have, here)
    yield from _requirements(have, here)
    if imported is not None:
        yield from _imported(have, here, imported)


def half_installed(here: Machine, have: Installed) -> Iterator[Problem]:
    """Packages of which pip knows and that are not there: an upgrade was cut short."""
    for name in ("torch", "torch_xla"):
        if name in have.versions and importlib.util.find_spec(name) is None:
            yield Problem(
                "half-installed",
                f"pip lists {name} {have.versions[name]}, and there is no module {name}: an "
                "installation was cut short, or removed by hand.",
                reinstall(here, have),
            )


def reinstall(here: Machine, have: Installed) -> str:
    """The fix for packages whose files are broken."""
    return f"`{_command(have, here)} --force-reinstall`, {versions.restart(here.platform)}"


def _python(have: Installed, here: Machine) -> Problem:
    pair = versions.OF_KAGGLE if here.platform == "kaggle" else versions.PAIRS[0]
    first, last = (".".join(map(str, one)) for one in pair.pythons)
    return Problem(
        "python",
        f"this is Python {'.'.join(map(str, have.python[:2]))}; torch_xla {pair.torch_xla} has "
        f"wheels for Python {first} to {last}.",
        f"make an environment with one of those, e.g. `python{last} -m venv`, and in it "
        f"`{_command(have, here)}`",
    )


def _pair(have: Installed, here: Machine) -> Iterator[Problem]:
    """The releases of torch and torch_xla must be the same: they are compiled together."""
    fix = f"`{_command(have, here)}`, {versions.restart(here.platform)}"
    torch, xla = have.release("torch"), have.release("torch_xla")
    if torch is None or xla is None:
        missing = " and ".join(name for name in ("torch", "torch_xla") if name not in have.versions)
        yield Problem(
            "torch-xla-missing",
            f"{missing} {'are' if ' ' in missing else 'is'} not installed, and runs need both.",
            fix,
        )
    elif torch[:2] != xla[:2]:
        yield Problem(
            "torch-pair",
            f"torch {have.versions['torch']} and torch_xla {have.versions['torch_xla']} do not "
            "belong together: torch_xla is compiled against one release of torch, and importing "
            "it fails with 'undefined symbol'.",
            fix,
        )
    elif versions.pair_of(xla) is None:
        yield Problem(
            "torch-xla-release",
            f"torch_xla {have.versions['torch_xla']} is not one of those that tpunb knows "
            f"({', '.join(pair.torch_xla for pair in versions.PAIRS)}).",
            fix,
            must=xla < versions.numbers(versions.PAIRS[-1].torch_xla),
        )


def _libtpu(have: Installed, here: Machine, env: Mapping[str, str]) -> Iterator[Problem]:
    """The TPU's own library speaks one version of PJRT, torch_xla another or the same."""
    pair = versions.pair_of(have.release("torch_xla"))
    if not here.chips or pair is None:
        return
    path = env.get("TPU_LIBRARY_PATH") or env.get("PTXLA_TPU_LIBRARY_PATH")
    if path and not Path(path).is_file():
        yield Problem(
            "libtpu-path",
            f"TPU_LIBRARY_PATH names {path}, which is not there.",
            "unset it (`%env -u TPU_LIBRARY_PATH`, or in the shell that started this): "
            "torch_xla finds the installed libtpu by itself",
        )
    if path:
        return  # the person has chosen another than the installed one
    command = versions.command(pair, here.platform, tpu=True, have=have)
    fix = f"`{command}`, {versions.restart(here.platform)}"
    if "libtpu-nightly" in have.versions and "libtpu" in have.versions:
        yield Problem(
            "libtpu-twice",
            "libtpu and libtpu-nightly are installed, into the same folder.",
            f"`pip uninstall -y libtpu libtpu-nightly`, then {fix}",
        )
    elif "libtpu" not in have.versions:
        yield Problem(
            "libtpu-missing",
            "libtpu, the library that drives the TPU, is not installed: torch_xla would run on "
            "the CPU.",
            fix,
        )
    elif (have.release("libtpu") or ())[:3] != versions.numbers(pair.libtpu):
        alone = " Never move libtpu or jax alone." if here.platform == "kaggle" else ""
        yield Problem(
            "libtpu-release",
            f"libtpu {have.versions['libtpu']} is not the one that torch_xla "
            f"{have.versions['torch_xla']} works with ({pair.libtpu}): the TPU does not start, "
            f"with a PJRT error. jax[tpu] brings its own libtpu.{alone}",
            fix,
        )


def _plugins(have: Installed, here: Machine, env: Mapping[str, str]) -> Iterator[Problem]:
    """Other libraries that bring a device to torch, or drive the TPU."""
    if "torch_tpu" in have.versions and here.chips:
        yield Problem(
            "torch-tpu",
            f"torch_tpu {have.versions['torch_tpu']} is installed beside torch_xla: "
            "`import torch` loads it, and it needs another torch and another libtpu.",
            "`pip uninstall -y torch_tpu`, then "
            f"`{_command(have, here)}`, {versions.restart(here.platform)}",
        )
    plugin, xla = have.release("torch_xla_cuda_plugin"), have.release("torch_xla")
    if plugin is not None and xla is not None and plugin[:2] != xla[:2]:
        yield Problem(
            "pjrt-plugin",
            f"torch_xla_cuda_plugin {have.versions['torch_xla_cuda_plugin']} does not fit "
            f"torch_xla {have.versions['torch_xla']}, which loads it: PJRT API versions differ.",
            "`pip uninstall -y torch_xla_cuda_plugin`: runs of tpunb use a TPU or the CPU",
        )


def _tensorflow(have: Installed, here: Machine) -> Iterator[Problem]:
    """TensorFlow for TPU or GPU and torch_xla register the same things twice in one process."""
    on_tpu = bool(here.chips)
    for name in ("tensorflow", "tensorflow-tpu"):
        if name not in have.versions or "torch_xla" not in have.versions:
            continue
        what = (
            "takes the TPU's library for itself, or aborts"
            if on_tpu
            else "can abort: both register the same protobuf messages"
        )
        yield Problem(
            "tensorflow",
            f"{name} {have.versions[name]} is installed: a process that imports it beside "
            f"torch_xla (transformers and tensorboard do) {what}.",
            f"`pip uninstall -y {name}` and, where it is needed, `pip install tensorflow-cpu`, "
            f"{versions.restart(here.platform)}; or set USE_TF=0 for transformers",
            must=on_tpu,
        )


def _requirements(have: Installed, here: Machine) -> Iterator[Problem]:
    """What one watched package says of another."""
    torch, numpy = have.release("torch"), have.release("numpy")
    if torch is not None and numpy is not None and numpy >= (2,) and torch < (2, 3):
        yield Problem(
            "numpy",
            f"torch {have.versions['torch']} was built for numpy 1; numpy {have.versions['numpy']}"
            " is installed, so `tensor.numpy()` raises 'Numpy is not available'.",
            f"`pip install 'numpy<2'`, {versions.restart(here.platform)}",
        )
    for name, needs in have.requires.items():
        for need in needs:
            if (part := versions.unmet(need, have)) is not None:
                yield _unmet(name, part, have, here)


def _unmet(name: str, part: str, have: Installed, here: Machine) -> Problem:
    other = part.partition("=")[0].rstrip("<>!~")
    installed = have.versions.get(other) or have.versions.get(other.replace("-", "_"), "")
    if name in ("torchvision", "torchaudio") and other == "torch":
        # Together, so that all are built alike: for the CPU, or with CUDA.
        fix = f"`pip uninstall -y torch torchvision torchaudio`, then `{_command(have, here)}`"
    else:
        fix = f"`pip install '{part}'`, if nothing else needs {other} {installed} (`pip check`)"
    return Problem(
        f"needs-{other.lower().replace('_', '-')}",
        f"{name} {have.versions[name]} needs {part}, and {other} {installed} is installed: "
        f"importing {name} may fail.",
        f"{fix}, {versions.restart(here.platform)}",
        must=False,
    )


def _imported(have: Installed, here: Machine, imported: Mapping[str, Any]) -> Iterator[Problem]:
    """Packages that were replaced after this kernel had imported them."""
    for name in ("torch", "torch_xla", "numpy"):
        loaded = getattr(imported.get(name), "__version__", None)
        if loaded is None or name not in have.versions:
            continue
        if versions.numbers(str(loaded)) != have.release(name):
            yield Problem(
                "restart",
                f"this kernel has imported {name} {loaded}, and {name} {have.versions[name]} was "
                "installed since.",
                f"{versions.restart(here.platform).removeprefix('then ')}: what is imported stays "
                "until then",
                must=False,
            )


def _command(have: Installed, here: Machine) -> str:
    pair = versions.best_pair(here.platform, have.python)
    if pair is None:
        pair = versions.OF_KAGGLE if here.platform == "kaggle" else versions.PAIRS[0]
    return versions.command(pair, here.platform, tpu=bool(here.chips), have=have)
