"""Names that torch_xla has removed up to 2.9 and that have an exact successor exist again.

So notebooks of 2019 to 2024, and libraries of that time, run unchanged: in ranks, under
%%tpu_debug and in the kernel's cells. A name or module that torch_xla has is left as it is. What
has no successor stays away: `notebook.removed_apis` has all names, and lint refuses those.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tpunb.utils.patching import Replacements

XM = "torch_xla.core.xla_model"
XR = "torch_xla.runtime"
XMP = "torch_xla.distributed.xla_multiprocessing"
PJRT = "torch_xla.experimental.pjrt"
SPMD = "torch_xla.distributed.spmd"

MODULES: Mapping[str, str] = {
    "torch_xla_py": "torch_xla",
    "torch_xla_py.xla_model": XM,
    "torch_xla_py.data_parallel": "torch_xla.distributed.data_parallel",
    "torch_xla_py.parallel_loader": "torch_xla.distributed.parallel_loader",
    "torch_xla_py.xla_multiprocessing": XMP,
    "torch_xla_py.utils": "torch_xla.utils.utils",
    "torch_xla_py.keyd_queue": "torch_xla.utils.keyd_queue",
    "torch_xla_py.graph_saver": "torch_xla.debug.graph_saver",
    "torch_xla_py.model_comparator": "torch_xla.debug.model_comparator",
    PJRT: XR,
    "torch_xla.experimental.tpu": "torch_xla._internal.tpu",
    "torch_xla.experimental.xla_sharding": f"{SPMD}.xla_sharding",
    "torch_xla.experimental.xla_sharded_tensor": f"{SPMD}.xla_sharded_tensor",
}
"""Removed modules, and the module that each of them is now."""

NAMES: Mapping[str, tuple[str, str]] = {
    f"{XM}.xrt_world_size": (f"{XR}.world_size", ""),
    f"{XM}.get_ordinal": (f"{XR}.global_ordinal", ""),
    "torch_xla.experimental.compile": ("torch_xla.compile", "*"),
    f"{PJRT}.rendezvous": (f"{XM}.rendezvous", "*"),
    f"{PJRT}.broadcast_master_param": (f"{XM}.broadcast_master_param", "*"),
    f"{PJRT}.spawn": (f"{XMP}.spawn", "fn nprocs start_method args"),
    f"{PJRT}.spawn_threads": (f"{XMP}.spawn", "fn args"),
}
"""Removed functions: the successor, and what is passed on to it: nothing, all arguments as they
are, or the arguments by these names."""

used: dict[str, str] = {}
"""What has been used in this process, or in the prelude before the fork: old name, new name."""

_installed: list[object] = []


def restore() -> None:
    """Have the names exist from now on in this process. Imports no module of torch_xla."""
    if _installed:
        return
    owners = dict.fromkeys(old.rpartition(".")[0] for old in NAMES if not old.startswith(PJRT))
    replacements = Replacements(dict.fromkeys(owners, _fill))
    replacements.begin()
    finder = _OldModules()
    sys.meta_path.append(finder)
    _installed.extend((replacements, finder))


def describe_used() -> list[str]:
    """Return a line for each name that was used: what to write today."""
    return [f"torch_xla no longer has {old}: write {new}" for old, new in sorted(used.items())]


def _fill(module: ModuleType) -> None:
    """Add to a module that exists the functions that it no longer has."""
    for old, (new, passed) in NAMES.items():
        owner, _, name = old.rpartition(".")
        if owner == module.__name__ and not hasattr(module, name):
            setattr(module, name, _successor(old, new, passed))


def _successor(old: str, new: str, passed: str) -> Callable[..., Any]:
    owner, _, name = new.rpartition(".")

    def call(*args: object, **kwargs: object) -> object:
        used[old] = new
        function = getattr(importlib.import_module(owner), name)
        if passed == "*":
            return function(*args, **kwargs)
        named = dict(zip(passed.split(), args, strict=False))
        return function(**named, **(kwargs if passed else {}))

    call.__name__ = call.__qualname__ = old.rpartition(".")[2]
    return call


class _OldModules(MetaPathFinder, Loader):
    """Finds the removed modules: each has the names of the module that it is now."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES or importlib.util.find_spec("torch_xla") is None:
            return None
        return ModuleSpec(fullname, self, is_package=fullname == "torch_xla_py")

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, MODULES[module.__name__]
        now = importlib.import_module(new)
        used[old] = new
        # Asked each time: a name of the module may be replaced later, as in a rehearsal.
        vars(module)["__getattr__"] = functools.partial(getattr, now)
        _fill(module)
        names = [*vars(now), *vars(module)]
        vars(module)["__all__"] = sorted({name for name in names if name[:1] != "_"})
