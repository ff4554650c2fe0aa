"""What is installed, and what belongs together. Read from metadata: nothing is imported."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Pair:
    """A torch_xla, and the releases that it works with."""

    torch_xla: str
    torch: str
    torchvision: str
    torchaudio: str
    libtpu: str
    jax: str
    """For Pallas kernels."""
    pythons: tuple[tuple[int, int], tuple[int, int]]
    """The first and the last for which there are wheels."""


# torch_xla and libtpu, jax, Python: the metadata and the wheels of torch_xla on PyPI (extras
# [tpu] and [pallas]); torchvision and torchaudio: their requirements of torch. The newest first.
# Colab's TPU runtime has the first pair (googlecolab/backend-info a724079), Kaggle's the second
# (Kaggle/docker-python 78aaa43, which holds libtpu back at 0.0.17 after installing jax).
PAIRS = (
    Pair("2.9.0", "2.9.0", "0.24.0", "2.9.0", "0.0.21", "0.7.1", ((3, 10), (3, 13))),
    Pair("2.8.0", "2.8.0", "0.23.0", "2.8.0", "0.0.17", "0.6.2", ((3, 10), (3, 13))),
)
OF_KAGGLE = PAIRS[1]
SHOWN = ("torch", "torch_xla", "libtpu", "ipykernel", "tpunb")
WATCHED = (
    *SHOWN,
    "ipython",
    "jax",
    "jaxlib",
    "libtpu-nightly",
    "numpy",
    "protobuf",
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-tpu",
    "torch_tpu",
    "torch_xla_cuda_plugin",
    "torchaudio",
    "torchvision",
    "transformers",
)
"""What can be in each other's way."""


@dataclass(frozen=True)
class Installed:
    """The packages of an interpreter, as far as they matter here."""

    python: tuple[int, ...]
    versions: dict[str, str]
    requires: dict[str, tuple[str, ...]]
    """What those that are there say they need."""

    def release(self, name: str) -> tuple[int, ...] | None:
        """The numbers of a version, '2.9.0+cpu' as (2, 9, 0); None if it is not there."""
        return numbers(self.versions[name]) if name in self.versions else None

    def shown(self) -> dict[str, str]:
        """For people: what a run depends on most."""
        found = {"python": ".".join(map(str, self.python))}
        return found | {name: self.versions[name] for name in SHOWN if name in self.versions}


def installed(path: Sequence[str] | None = None, python: tuple[int, ...] = ()) -> Installed:
    """Look at the packages of this interpreter, or at those in the folders of `path`."""
    found: dict[str, str] = {}
    needs: dict[str, tuple[str, ...]] = {}
    for name in WATCHED:
        # The first on the path is the one that is imported.
        for one in metadata.distributions(name=name, path=list(sys.path if path is None else path)):
            found[name] = one.version
            needs[name] = tuple(one.requires or ())
            break
    return Installed(python or tuple(sys.version_info[:3]), found, needs)


def numbers(version: str) -> tuple[int, ...]:
    """The release of a version: '2.9.0+cpu' and '2.9.0rc1' are (2, 9, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def pair_of(torch_xla: tuple[int, ...] | None) -> Pair | None:
    """The row of the table for a release of torch_xla, whatever its last number is."""
    for pair in PAIRS:
        if torch_xla is not None and torch_xla[:2] == numbers(pair.torch_xla)[:2]:
            return pair
    return None


def best_pair(platform: str, python: tuple[int, ...]) -> Pair | None:
    """The pair to install: Kaggle's own there, elsewhere the newest for this Python."""
    for pair in (OF_KAGGLE,) if platform == "kaggle" else PAIRS:
        if pair.pythons[0] <= python[:2] <= pair.pythons[1]:
            return pair
    return None


def command(pair: Pair, platform: str, *, tpu: bool, have: Installed) -> str:
    """The command that installs a pair here, all of it at once, with what depends on it."""
    wanted = [f"torch=={pair.torch}"]
    for name, version in (("torchvision", pair.torchvision), ("torchaudio", pair.torchaudio)):
        if name in have.versions:
            wanted.append(f"{name}=={version}")
    wanted.append(f"'torch_xla[tpu]=={pair.torch_xla}'" if tpu else f"torch_xla=={pair.torch_xla}")
    if platform == "kaggle" and tpu:
        wanted.append(f"libtpu=={pair.libtpu}")
    if not tpu and platform not in ("colab", "kaggle"):
        return " ".join(["pip install", *wanted])
    # Wheels for the CPU, as Colab's and Kaggle's TPU images have them: a tenth of the size of those
    # with CUDA. pip finds them in an index of their own only; uv knows it by its name.
    there = "--system" if platform in ("colab", "kaggle") else "--python python3"
    install = f"uv pip install {there} --torch-backend=cpu"
    return " ".join(["pip install uv && " + install, *wanted])


def restart(platform: str) -> str:
    """How to start again on this platform what has imported the old ones."""
    return {
        "colab": "then Runtime > Restart session",
        "kaggle": "then Run > Restart & clear cell outputs",
    }.get(platform, "then restart the kernel")


_CLAUSE = re.compile(r"(===|==|!=|<=|>=|~=|<|>)\s*([0-9][^\s,;)]*)")


def unmet(requirement: str, have: Installed) -> str | None:
    """The part of a requirement that what is installed does not meet; None if all is well.

    Requirements of extras, or of other machines, and of packages that are not watched are
    passed over. By hand, because importing `packaging` takes as long as all else together.
    """
    text, _, marker = requirement.partition(";")
    match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(\[[^]]*\])?", text)
    if match is None or marker.strip():
        return None
    version = have.release(match.group(1).replace("-", "_")) or have.release(match.group(1))
    if version is None:
        return None
    for sign, wanted in _CLAUSE.findall(text[match.end() :]):
        if not _holds(version, sign, wanted):
            return f"{match.group(1)}{sign}{wanted}"
    return None


def _holds(version: tuple[int, ...], sign: str, wanted: str) -> bool:
    want = numbers(wanted)
    size = max(len(version), len(want))
    mine, other = (one + (0,) * (size - len(one)) for one in (version, want))
    if wanted.endswith(".*"):
        same = version[: len(want)] == want
        return same if sign == "==" else not same
    if sign == "~=":
        return mine >= other and version[: len(want) - 1] == want[:-1]
    return {
        "==": mine == other, "===": mine == other, "!=": mine != other,
        "<": mine < other, "<=": mine <= other, ">": mine > other, ">=": mine >= other,
    }[sign]  # fmt: skip
