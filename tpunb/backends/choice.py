"""Which backend the runs of a notebook use, and why. Standard library only."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from tpunb.runs.spec import BackendName, Device
from tpunb.utils.errors import MissingPackageError, SetupError
from tpunb.utils.install_commands import INSTALL_TORCH, INSTALL_TORCHTPU, INSTALL_XLA

LABELS: Mapping[BackendName, str] = {
    "xla": "torch_xla",
    "torchtpu": "TorchTPU",
    "torch": "torch.distributed",
}
"""The backends in messages."""
TORCHTPU_SINCE = (2, 11)
"""The first torch with everything that `torch.device("tpu")` needs (torch_tpu 0.2)."""


@dataclass(frozen=True)
class Installed:
    """What is installed, as far as it matters for the choice."""

    torch: tuple[int, ...]
    """Major and minor version; () without torch."""
    torch_xla: bool
    torch_tpu: bool

    @property
    def has_xla(self) -> bool:
        """True if torch_xla can be used: it ends with torch 2.9."""
        return self.torch_xla and self.torch < TORCHTPU_SINCE

    @property
    def has_torchtpu(self) -> bool:
        """True if `torch.device("tpu")` can be used, or rehearsed."""
        return self.torch >= TORCHTPU_SINCE


@dataclass(frozen=True)
class NamedBackend:
    """Code that names a backend."""

    place: str
    """'cell [3] has `import torch_xla`'."""
    certain: bool
    """False for code that other backends may run, too: a fallback, a branch on the hardware."""


@dataclass(frozen=True)
class BackendChoice:
    """A backend, and the reason for it."""

    backend: BackendName
    why: str
    """'cell [3] has `import torch_xla`', 'torch_xla is installed'."""
    installed: Installed
    cpu: bool = False
    """True if the code, for plain torch, trains on the CPU even where there is a GPU."""

    def __str__(self) -> str:
        """'backend: TorchTPU (cell [3] has `torch.device("tpu")`)'."""
        return f"backend: {LABELS[self.backend]} ({self.why})"

    def require(self, purpose: str, *, on_tpu: bool) -> None:
        """Raise SetupError unless everything is installed that a run with this backend needs.

        `purpose`: '%%tpu_train'. `on_tpu`: this machine has a TPU.
        """
        if (error := self.problem(purpose, on_tpu=on_tpu)) is not None:
            raise error

    def problem(self, purpose: str = "training", *, on_tpu: bool) -> SetupError | None:
        """What `require` raises, or None."""
        installed, why = self.installed, f"{purpose} ({self.why})"
        version = ".".join(map(str, installed.torch))
        if self.backend == "xla" and not (installed.torch and installed.has_xla):
            fix = f"`{INSTALL_XLA}` installs a matching pair"
            if installed.has_torchtpu:
                fix += "; docs/coming_from.md has what TorchTPU calls the names of torch_xla"
            if installed.torch_xla and installed.torch:
                return SetupError(
                    f"torch_xla is needed for {why}, and it ends with torch 2.9, but torch "
                    f"{version} is installed: {fix}"
                )
            return MissingPackageError("torch_xla" if installed.torch else "torch", why, fix)
        if self.backend == "xla" and (library := missing_libpython()) is not None:
            return MissingPackageError(library[0], why, library[1])
        install = f"`{INSTALL_TORCHTPU if on_tpu else INSTALL_TORCH}`"
        if not installed.torch:
            elsewhere = "" if on_tpu else "; on a TPU, `tpunb doctor` shows the command"
            return MissingPackageError("torch", why, f"{install} installs it{elsewhere}")
        if self.backend == "torchtpu" and not installed.has_torchtpu:
            return SetupError(
                f"TorchTPU is needed for {why}, and it needs torch 2.11 or later, but torch "
                f"{version} is installed. In an environment without torch_xla: {install}"
            )
        if self.backend == "torchtpu" and on_tpu and not installed.torch_tpu:
            return MissingPackageError("torch_tpu", why, f"{install} installs it")
        return None


def require_one_host(backend: BackendName, device: Device, hosts: int) -> None:
    """Raise SetupError for a TPU that would be rehearsed on several hosts."""
    if hosts > 1 and device == "CPU" and backend != "torch":
        raise SetupError(
            f"{LABELS[backend]} is rehearsed on one host, and these are {hosts} hosts without a "
            "TPU: test them with plain torch, a train cell for torch.distributed with gloo (`%tpu_"
            "setup --backend torch`), rehearse on one host, or use hosts with TPUs"
        )


def find_installed() -> Installed:
    """Look for the packages without importing them."""
    try:
        parts = metadata.version("torch").split(".")[:2]
    except metadata.PackageNotFoundError:
        parts = []
    return Installed(
        tuple(int(part) for part in parts if part.isdecimal()),
        *(is_installed(name) for name in ("torch_xla", "torch_tpu")),
    )


def missing_libpython() -> tuple[str, str] | None:
    """Python's shared library, to which torch_xla is linked, if it cannot be loaded, and the fix.

    Debian and Ubuntu have it in a package of its own.
    """
    version = ".".join(map(str, sys.version_info[:2]))
    try:
        ctypes.CDLL(name := f"libpython{version}.so.1.0")
    except OSError:
        if sys.base_prefix == "/usr":
            return name, f"`sudo apt install libpython{version}`"
        return name, "use a Python that was built with its shared library (--enable-shared)"
    return None


def is_installed(package: str) -> bool:
    """Return whether a process that has not loaded this package yet could import it.

    `importlib.util.find_spec` looks into sys.modules, too, where a rehearsal has a stand-in for
    torch_tpu, installed or not.
    """
    finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
    specs = (finder.find_spec(package, None) for finder in finders)
    spec = next(filter(None, specs), None)
    return spec is not None and spec.loader is not None


def choose(
    asked: BackendName | None,
    named: Mapping[BackendName, NamedBackend] | None,
    installed: Installed,
) -> BackendChoice:
    """Choose a backend: the one that was asked for, that the code names, or that is installed.

    If the code names both torch_xla and TorchTPU, or may run with either, what is installed
    decides. `%tpu_setup --backend` is `asked`. `named`: None if there is no code to look at.
    """
    if asked is not None:
        return BackendChoice(asked, f"%tpu_setup --backend {asked}", installed)
    backend = _named(named or {}, installed)
    if named and backend is not None:
        return BackendChoice(backend, named[backend].place, installed)
    none = "" if named is None else ", and no cell names another backend"
    if installed.torch_tpu and installed.has_torchtpu:
        return BackendChoice("torchtpu", f"torch_tpu is installed{none}", installed)
    if installed.has_xla:
        return BackendChoice("xla", f"torch_xla is installed{none}", installed)
    missing = "does not fit this torch" if installed.torch_xla else "is not installed"
    library = "torch_xla" if installed.torch else "torch"
    return BackendChoice("torch", f"{library} {missing}{none}", installed)


def _named(named: Mapping[BackendName, NamedBackend], installed: Installed) -> BackendName | None:
    fits: dict[BackendName, bool] = {
        "xla": installed.has_xla,
        "torchtpu": installed.has_torchtpu,
    }
    certain = [name for name in fits if name in named and named[name].certain]
    possible = [name for name in fits if name in named and fits[name]]
    if len(certain) == 1:
        return certain[0]
    if possible or certain:
        return (possible or certain)[0]
    return "torch" if "torch" in named and named["torch"].certain else None
