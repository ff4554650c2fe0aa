"""Private names are used in tpunb.backends.xla only, and exist with the expected signatures."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.drivers.ranks import Ranks
from tpunb.backends.xla import private_names

SIGNATURES = """
_set_all_reduce_token(str, _XLAC.IrValue) -> None
_xla_all_gather(torch.Tensor, int, int, list, bool, Optional[int], Optional[bool]) -> torch.Tensor
_xla_all_gather_coalesced(list[torch.Tensor], _XLAC.IrValue, int, int, list, bool) -> list
_xla_all_gather_coalesced_out(list[torch.Tensor], list[torch.Tensor], _XLAC.IrValue, int, int, \
list, bool) -> _XLAC.IrValue
_xla_all_gather_out(torch.Tensor, torch.Tensor, _XLAC.IrValue, int, int, list, bool) -> \
_XLAC.IrValue
_xla_all_reduce(str, torch.Tensor, float, list, bool) -> torch.Tensor
_xla_all_reduce_inplace(str, list[torch.Tensor], float, list, bool) -> None
_xla_all_to_all(torch.Tensor, _XLAC.IrValue, int, int, int, list, bool) -> tuple
_xla_collective_permute(torch.Tensor, _XLAC.IrValue, list) -> tuple
_xla_recv(torch.Tensor, _XLAC.IrValue, int) -> tuple
_xla_reduce_scatter(str, torch.Tensor, _XLAC.IrValue, float, int, int, list, bool, \
Optional[int], Optional[bool]) -> tuple
_xla_reduce_scatter_coalesced(str, list[torch.Tensor], _XLAC.IrValue, float, int, int, list, \
bool) -> list
_xla_reduce_scatter_coalesced_out(str, list[torch.Tensor], list[torch.Tensor], _XLAC.IrValue, \
float, int, int, list, bool) -> _XLAC.IrValue
_xla_reduce_scatter_out(str, torch.Tensor, torch.Tensor, _XLAC.IrValue, float, int, int, list, \
bool) -> _XLAC.IrValue
_xla_send(torch.Tensor, _XLAC.IrValue, int) -> tuple
_xla_spmd_all_reduce(str, torch.Tensor, float, list) -> torch.Tensor
_xla_spmd_reduce_scatter(str, torch.Tensor, float, int, int, list) -> torch.Tensor
_c10d_functional::all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor
_c10d_functional::all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor
_c10d_functional::all_to_all_single(Tensor input, SymInt[] output_split_sizes, SymInt[] \
input_split_sizes, str group_name) -> Tensor
_c10d_functional::reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, str \
group_name) -> Tensor
torch.distributed.rendezvous._create_c10d_store(hostname, port, rank, world_size, timeout, \
use_libuv)
torch_xla._dynamo.dynamo_bridge.extract_compiled_graph_helper(xla_model, xla_args)
torch_xla._internal.pjrt.run_multiprocess(fn, args, start_method, kwargs)
torch_xla._internal.pjrt.spawn(fn, nprocs, start_method, args)
torch_xla.core.xla_model._all_gather_using_all_reduce(value, dim, groups, pin_layout)
torch_xla.core.xla_model.xla_rendezvous(payload, ordinals, tag)
""".strip().splitlines()
"""Of the functions that are replaced: as torch 2.8 and 2.9, torch_xla 2.8 and 2.9 have them,
written the same way."""
REPLACED = ("collective", "refused", "launcher", "meeting", "compiler")

NO_FUNCTIONS = {"torch.distributed.rendezvous._rendezvous_handlers", "torch_xla.torch_xla.dist"}


PACKAGE = Path(private_names.__file__).parents[2]
LIBRARIES = ("torch", "torch_xla")
DECLARED = {"_XLAC", *(n.name for n in private_names.NAMES if n.name.startswith("_"))}
ALIASES = {"xla": "torch_xla", "xm": "torch_xla", "xr": "torch_xla", "met": "torch_xla"}
"""Names by which this package calls a module of torch_xla without importing it."""


def _is_private(dotted: str) -> bool:
    """True for 'torch._C.x' and 'torch_xla._internal', and not for 'torch.nn' or 'os._exit'."""
    first, *parts = dotted.split(".")
    return first in LIBRARIES and any(re.match(r"_(?!_)", part) for part in parts)


def _dotted(node: ast.AST, modules: dict[str, str]) -> str:
    """'torch_xla._XLAC' for an attribute of a module, by the module's own name; otherwise ''."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([modules.get(node.id, ""), *reversed(parts)])


def private_uses(source: str) -> Iterator[tuple[int, str]]:
    """Lines of a module that use a private name of torch or torch_xla, and the name."""
    tree = ast.parse(source)
    modules = {"torch": "torch", "torch_xla": "torch_xla", **ALIASES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.name if alias.asname else alias.name.partition(".")[0]
                modules[alias.asname or bound] = bound
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if _is_private(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name for name in imported if _is_private(name)]
        elif isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if _is_private(_dotted(node, modules)) or (node.attr in DECLARED and not of_self):
                names = [node.attr]
        elif isinstance(node, ast.Call):  # getattr(module, "_name"), import_module("torch._C")
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("getattr", "setattr", "hasattr", "import_module", "__import__"):
                texts = [text for text in texts if isinstance(text, str)]
                names = [text for text in texts if _is_private(text) or text in DECLARED]
        yield from ((node.lineno, name) for name in names)


def test_only_backends_use_private_names() -> None:
    uses = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if PACKAGE / "backends" not in path.parents
        for line, name in private_uses(path.read_text(encoding="utf-8"))
    ]
    assert uses == [], "move these behind a function of tpunb.backends"


def test_private_names_are_found_and_others_are_not() -> None:
    private = (
        "import torch_xla\ntorch_xla._XLAC",
        "xla = sys.modules['torch_xla']\nxla._XLAC._xla_step_marker",
        "from torch_xla import _XLAC",
        "from torch_xla._internal import pjrt",
        "import torch._dynamo",
        "from torch.distributed import rendezvous as r\nr._create_c10d_store",
        "loader._parallel_loader = None",
        "storage._cdata",
        "getattr(xla, '_XLAC')",
        "importlib.import_module('torch_xla._internal.tpu')",
    )
    public = (
        "import torch\ntorch.nn.Linear.__init__",
        "self._loader = 1\nself._sync()",
        "import os\nos._exit(0)",
        "REMOVED = {'torch_xla._internal.tpu': 'not public'}",
    )
    assert [source for source in private if not list(private_uses(source))] == []
    assert [source for source in public if list(private_uses(source))] == []


def _written(name: private_names.Name) -> str:
    """The signature of a name; '' if it is not a function."""
    import torch
    import torch_xla

    if name.owner == private_names.OPS:
        return str(getattr(torch.ops._c10d_functional, name.name).default._schema)
    if name.owner != private_names.XLAC:
        full = f"{name.owner}.{name.name}"
        function = getattr(importlib.import_module(name.owner), name.name)
        return "" if full in NO_FUNCTIONS else f"{full}({_parameters(function)})"
    text = getattr(torch_xla._XLAC, name.name).__doc__.partition("\n")[0]
    # pybind11 of torch_xla 2.9 writes the same signature differently than that of 2.8.
    for new, old in (("SupportsInt", "int"), ("SupportsFloat", "float")):
        text = text.replace(f"typing.{new}", old)
    text = text.replace("collections.abc.Sequence", "list")
    return re.sub(r"arg\d: ", "", re.sub(r"(\w+) \| None", r"Optional[\1]", text))


def _parameters(function: Callable[..., object]) -> str:
    return ", ".join(inspect.signature(function).parameters)


def signatures() -> list[str]:
    import torch_xla._dynamo.dynamo_bridge
    import torch_xla.core.xla_model  # noqa: F401

    own = [
        name
        for name in private_names.NAMES
        if name.owner.split(".")[0] in OWNERS and name.kind in REPLACED
    ]
    return [written for name in own if (written := _written(name))]


OWNERS = ("torch_xla", "torch", private_names.OPS)
"""Libraries whose names this test checks. Other libraries: tests/long/test_frameworks.py."""


def test_signatures_are_those_that_were_looked_up(ranks: Ranks) -> None:
    (found,) = ranks.values(signatures, 1)
    assert len(found) > 20
    assert sorted(set(found) - set(SIGNATURES)) == [], "new or changed: look them up in 2.8 and 2.9"


def unknown() -> list[str]:
    import torch
    import torch_xla
    import torch_xla._dynamo.dynamo_bridge

    known = {name.name for name in private_names.NAMES}
    collective = r"all_reduce|all_gather|all_to_all|permute|broadcast|reduce_scatter|send|recv"
    found = [
        name
        for name in dir(torch_xla._XLAC)
        if re.search(rf"_xla.*({collective}|num_processes|process_index|replication)", name)
    ]
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("XLA")
    found += [
        name.partition("::")[2]
        for name in registered
        if name.startswith(("_c10d_functional::", "c10d::", "c10d_functional::"))
    ]
    for name in private_names.NAMES:
        if name.owner == private_names.OPS:
            assert f"{name.owner}::{name.name}" in registered
    # broadcast is torch_xla's own Python code on top of xm.all_reduce.
    return sorted(set(found) - known - {"broadcast"})


def test_no_collective_of_torch_xla_is_unknown(ranks: Ranks) -> None:
    assert ranks.values(unknown, 1) == [[]]


def missing_attributes() -> list[str]:
    import torch
    import torch_xla
    import torch_xla.distributed.parallel_loader as pl
    from torch._C._distributed_c10d import ProcessGroupGloo

    loader = pl.MpDeviceLoader([torch.ones(1)], torch_xla.device())
    parallel = pl.ParallelLoader([torch.ones(1)], [torch_xla.device()])
    tensor = torch.ones(1)
    objects: dict[str, Any] = {
        "torch_xla.distributed.parallel_loader.MpDeviceLoader": loader,
        "torch_xla.distributed.parallel_loader.ParallelLoader": parallel,
        "torch.Tensor": tensor,
        "torch.UntypedStorage": tensor.untyped_storage(),
        "torch.autograd.Variable": torch.autograd.Variable,
        "torch._C._distributed_c10d.ProcessGroupGloo": ProcessGroupGloo,
    }
    return [
        f"{name.owner}.{name.name}"
        for name in private_names.NAMES
        if name.kind == "attribute" and not hasattr(objects[name.owner], name.name)
    ]


def test_attributes_are_there(ranks: Ranks) -> None:
    assert ranks.values(missing_attributes, 1) == [[]]
