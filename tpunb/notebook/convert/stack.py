"""Find which of the three stacks a notebook is written for: torch_xla, TorchTPU or plain torch.

Only code counts: names in strings, comments, magics and modules of `%%writefile` do not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tpunb.notebook.convert.cells import parse_body
from tpunb.notebook.scopes import dotted, last_part
from tpunb.runs.spec import BackendName

_WORD = re.compile(r"xla|tpu|cuda|gloo|nccl|init_process_group|DistributedDataParallel")
_PACKAGES: Mapping[str, BackendName] = {
    "torch_xla": "xla",
    "torch_tpu": "torchtpu",
    "torch.tpu": "torchtpu",
    "torch.cuda": "torch",
}
_DEVICES: Mapping[str, BackendName] = {"xla": "xla", "tpu": "torchtpu", "cuda": "torch"}
_BACKENDS: Mapping[str, BackendName] = {
    **{"xla": "xla", "openxla": "xla"},
    **{"tpu_dist": "torchtpu", "tpu": "torchtpu"},
    **{"gloo": "torch", "nccl": "torch"},
}
"""Backends of process groups and of torch.compile, the one that decides first."""
_TAKE_DEVICE = frozenset(
    {
        *("device", "to", "autocast", "GradScaler", "init_device_mesh", "DeviceMesh"),
        *("set_default_device", "Generator", "get_device_module"),
    }
)
"""Functions and methods whose first argument is a device."""
_DEVICE_WORDS = frozenset({"device", "device_type", "map_location"})
_NEED_NO_GPU = {
    f"torch.cuda.{name}"
    for name in ("is_available", "device_count", "manual_seed", "manual_seed_all", "empty_cache")
}
"""They do nothing where there is no GPU, so many notebooks for TPUs have them too."""
_CHOOSES_DEVICE = re.compile(r"\b(?:accelerate|accelerator|lightning|transformers|fastai)\b")
"""What takes a GPU where there is one."""
_SHARED = "DistributedDataParallel"
_CATCH_IMPORT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


@dataclass(frozen=True)
class StackEvidence:
    """Code that belongs to one stack."""

    cell: int
    """Position in the cells given, from 0."""
    line: int
    """Within the cell, from 1."""
    found: str
    """'import torch_xla', 'torch.tpu.synchronize', 'to("tpu")'."""
    certain: bool
    """False for code that other stacks may run too: an import with a fallback, a branch on the
    hardware, `torch.cuda.is_available()`, DistributedDataParallel."""


_Found = tuple[BackendName, StackEvidence]
_Named = tuple[BackendName, str, bool]
"""A backend, what was found, and whether it is certain."""


def stacks_named(cells: Sequence[str]) -> Mapping[BackendName, StackEvidence]:
    """Return the best evidence for each stack that the sources of code cells name: the first that
    is certain, otherwise the first.

    Cells that are not Python name none. The result of each text is cached.
    """
    best: dict[BackendName, StackEvidence] = {}
    for index, text in enumerate(cells):
        for name, found in _in_cell(text):
            if name not in best or (found.certain and not best[name].certain):
                best[name] = StackEvidence(index, found.line, found.found, found.certain)
    return best


def written_for(cells: Sequence[str]) -> BackendName | None:
    """Return the stack whose rules apply to code cells; None if the code does not show it.

    torch_xla's names, then TorchTPU's, come before names of plain torch. Names of GPUs alone show
    nothing, as the notebook may be about to move to a TPU.
    """
    found = stacks_named(cells)
    for name in ("xla", "torchtpu"):
        if name in found and found[name].certain:
            return name
    torch = found.get("torch")
    gpu = torch is not None and any(word in torch.found for word in ("cuda", "nccl"))
    if torch is not None and torch.certain and not gpu:
        return "torch"
    return next((name for name in ("xla", "torchtpu") if name in found), None)


def names_cpu_only(cells: Sequence[str]) -> bool:
    """True if code makes its process group with gloo, and neither it nor a library that it uses
    would choose a GPU: its ranks belong on the CPU, also where there is a GPU.
    """
    found = [found for text in cells for _, found in _in_cell(text)]
    free = {"torch.cuda", *_NEED_NO_GPU}  # the first is a part of each longer name
    gpu = any("cuda" in f.found or "nccl" in f.found for f in found if f.found not in free)
    gloo = any(f.certain and f.found == 'init_process_group("gloo")' for f in found)
    return gloo and not gpu and not any(map(_CHOOSES_DEVICE.search, cells))


@lru_cache(maxsize=2048)
def _in_cell(text: str) -> tuple[_Found, ...]:
    if not _WORD.search(text):
        return ()
    found = [
        (name, StackEvidence(0, getattr(node, "lineno", 1), what, sure and certain))
        for node, sure in _walk(parse_body(text)[0])
        for name, what, certain in _named(node)
    ]
    return tuple(sorted(found, key=lambda entry: entry[1].line))


def _walk(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """Yield all nodes, each with whether it runs on any hardware and without a fallback."""
    todo: list[tuple[ast.AST, bool]] = [(tree, True)]
    while todo:
        node, sure = todo.pop()
        yield node, sure
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            sure = sure and not _asks_hardware(node.test)
        elif isinstance(node, ast.ExceptHandler) or (
            isinstance(node, ast.Try) and any(map(_catches_import, node.handlers))
        ):
            sure = False
        todo += ((child, sure) for child in ast.iter_child_nodes(node))


def _catches_import(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or last_part(kind) in _CATCH_IMPORT for kind in kinds)


def _asks_hardware(test: ast.expr) -> bool:
    names = {last_part(part).lower() for part in ast.walk(test) if isinstance(part, ast.expr)}
    names |= {str(part.value).lower() for part in ast.walk(test) if isinstance(part, ast.Constant)}
    return any(word in name for name in names for word in ("cuda", "gpu", "tpu", "xla"))


def _named(node: ast.AST) -> Iterator[_Named]:
    """Yield each stack that a node itself names."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield from _package(alias.name, f"import {alias.name}")
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            yield from _package(full, f"from {node.module} import {alias.name}")
    elif isinstance(node, ast.Attribute | ast.Name):
        if name := dotted(node):
            yield from _package(name, name)
    elif isinstance(node, ast.Call):
        yield from _call(node)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for name in map(last_part, targets):
            yield from _setting(name, node.value)
    elif isinstance(node, ast.arguments):
        every = [*node.posonlyargs, *node.args]
        defaults = zip(every[len(every) - len(node.defaults) :], node.defaults, strict=True)
        for arg, value in (*defaults, *zip(node.kwonlyargs, node.kw_defaults, strict=True)):
            yield from _setting(arg.arg, value)


def _package(full: str, what: str) -> Iterator[_Named]:
    if full.rpartition(".")[2] == _SHARED:
        yield "torch", what, False
    for package, name in _PACKAGES.items():
        if f"{full}.".startswith(f"{package}."):
            yield name, what, full != "torch.cuda" and full not in _NEED_NO_GPU


def _setting(name: str, value: ast.expr | None) -> Iterator[_Named]:
    """`device = "tpu"`, `BACKEND = "gloo"`, also as a parameter's default."""
    kinds = [kind for kind in ("device", "backend") if kind in name.lower()]
    if value is not None and kinds:
        read = _devices if kinds == ["device"] else _backends
        for stack, text, certain in read(value):
            yield stack, f'{name} = "{text}"', certain


def _call(node: ast.Call) -> Iterator[_Named]:
    called = last_part(node.func)
    if called in ("cuda", "tpu") and isinstance(node.func, ast.Attribute):
        yield _DEVICES[called], f".{called}()", True
    if called in _TAKE_DEVICE and node.args:
        for name, text, certain in _devices(node.args[0]):
            yield name, f'{called}("{text}")', certain
    for word in node.keywords:
        if word.arg in _DEVICE_WORDS:
            for name, text, certain in _devices(word.value):
                yield name, f'{called}({word.arg}="{text}")', certain
    yield from _of_group(node, called)


def _of_group(node: ast.Call, called: str) -> Iterator[_Named]:
    given = [word.value for word in node.keywords if word.arg == "backend"]
    starts = called == "init_process_group"
    if starts:
        given += node.args[:1]
    for value in given:
        for name, text, certain in _backends(value):
            # Groups of the CPU beside the one of the device: new_group(backend="gloo").
            yield name, f'{called}("{text}")', certain and (starts or name != "torch")
    if starts and not given:
        yield "torch", "init_process_group()", False


def _strings(value: ast.expr) -> Iterator[tuple[str, bool]]:
    """Yield the strings that an expression may be, `f"tpu:{rank}"` as "tpu:"."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value, True
    elif isinstance(value, ast.JoinedStr):
        yield from ((text, sure) for part in value.values[:1] for text, sure in _strings(part))
    elif isinstance(value, ast.IfExp):
        for branch in (value.body, value.orelse):
            yield from ((text, False) for text, _ in _strings(branch))


def _devices(value: ast.expr) -> Iterator[_Named]:
    for text, certain in _strings(value):
        kind, colon, number = text.partition(":")
        if kind in _DEVICES and (not colon or not number or number.isdigit()):
            yield _DEVICES[kind], text, certain


def _backends(value: ast.expr) -> Iterator[_Named]:
    for text, certain in _strings(value):
        parts = set(re.split(r"[:,\s]+", text))
        if stack := next((_BACKENDS[name] for name in _BACKENDS if name in parts), None):
            yield stack, text, certain
