"""Lint rules on TorchTPU: what fails with torch_tpu 0.2.0 (torch 2.11 to 2.15)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpunb.notebook.lint.checks.sites import (
    constant,
    for_other_hardware,
    has_spread,
    is_tried,
    receiver,
    values_of,
)
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.rules import TORCHTPU, TPUS, Hit, rule
from tpunb.notebook.scopes import Site, argument, imported, last_part, literal

DIST = "torch.distributed"
DDP = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
)
_LIBRARY = {"xla": "torch_xla", "torchtpu": "torch_tpu"}
OTHERS = {"xla": "torch_tpu", "torchtpu": "torch_xla"}
"""The library that a notebook of each backend cannot use."""
STRINGS = {"xla": "tpu", "torchtpu": "xla"}
"""The device that a notebook of each backend does not have."""


@rule(
    "two-tpu-libraries",
    "error",
    what="torch_xla and torch_tpu, or the devices 'xla' and 'tpu', in one notebook",
    why="torch_xla 2.9 needs torch 2.9 and torch_tpu 0.2.0 needs torch 2.11 or later, so that one "
    "of the imports fails, and neither library has the other's device (the requirements of both "
    "packages)",
    fix="use one of them",
    backends=TPUS,
)
def _two_tpu_libraries(notebook: NotebookIndex) -> Iterator[Hit]:
    other = OTHERS[notebook.backend]
    for site in notebook.sites.imports:
        names = [full for _, full in imported(site.node)]
        if any(name.partition(".")[0] == other for name in names) and not _may_be_other(site):
            message = f"{other} cannot be installed beside {_LIBRARY[notebook.backend]}"
            yield Hit(site, message, certain=True)
    device = STRINGS[notebook.backend]
    for name in ("to", "device", "autocast"):
        for site in notebook.called.get(name, ()):
            given = argument(site.call, "device_type" if name == "autocast" else "device", 0)
            text = literal(given)
            named = isinstance(text, str) and text.partition(":")[0] == device
            if named and not _may_be_other(site) and _is_torchs(notebook, site):
                yield Hit(site, f"the library that this notebook uses has no device {text!r}")


def _may_be_other(site: Site) -> bool:
    return is_tried(site) or for_other_hardware(site)


def _is_torchs(notebook: NotebookIndex, site: Site) -> bool:
    """Whether a call is a function of torch, or a method of an object."""
    full = notebook.full(site.call.func, site)
    return full.startswith("torch.") or (not full and receiver(site) is not None)


def _literal_rank(notebook: NotebookIndex, node: ast.expr | None, site: Site) -> bool:
    """Whether an expression is a number other than 0, or the rank."""
    if node is None:
        return False
    value = constant(notebook, node, site)
    if isinstance(value, int):
        return value != 0
    return notebook.depends_on_rank(node, site)


@rule(
    "tpu-device-number",
    "error",
    what="a TPU chosen by the rank's number: `set_device(local_rank)`, `device=f'tpu:{rank}'`",
    why="each process has one core, which is tpu:0 in all of them: ValueError or RuntimeError for "
    "any other number (torch_tpu 0.2.0 set_device; rehearsed)",
    fix="leave out the number: `torch.device('tpu')`; no call of set_device is needed",
    backends=TORCHTPU,
)
def _tpu_device_number(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of("torch.tpu.set_device"):
        message = "`torch.tpu.set_device` raises, and each rank has one core, number 0"
        yield Hit(site, message, certain=True)
    for name in ("set_device_index", "set_device_idx"):
        for site in notebook.calls_of(f"torch.accelerator.{name}"):
            given = site.call.args[0] if site.call.args else None
            if _literal_rank(notebook, given, site) or _numbered(notebook, given, site):
                yield Hit(site, "each rank has one core, number 0", several=True)
    for site in notebook.sites.calls:
        full = notebook.full(site.call.func, site)
        makes_device = full == "torch.device"
        second = site.call.args[1] if makes_device and len(site.call.args) > 1 else None
        numbered = any(_numbered(notebook, part, site) for part in _devices_of(notebook, site))
        if numbered or (
            literal(site.call.args[0] if second is not None else None) == "tpu"
            and _literal_rank(notebook, second, site)
        ):
            certain = full.startswith("torch.") and not makes_device
            yield Hit(site, "each rank has one core, tpu:0", certain=certain, several=True)


def _devices_of(notebook: NotebookIndex, site: Site) -> Iterator[ast.expr]:
    """Yield the devices that are given to a call."""
    first = last_part(site.call.func) in ("to", "device") and _is_torchs(notebook, site)
    given = argument(site.call, "device", 0 if first else None)
    for part in (given, argument(site.call, "map_location")):
        if part is not None:
            yield part


def _numbered(notebook: NotebookIndex, node: ast.expr | None, site: Site) -> bool:
    """Whether an expression is 'tpu:1', or f'tpu:{rank}'."""
    if isinstance(node, ast.JoinedStr) and len(node.values) == 2:
        start, number = node.values
        return (
            literal(start) == "tpu:"
            and isinstance(number, ast.FormattedValue)
            and _literal_rank(notebook, number.value, site)
        )
    text = literal(node)
    if not isinstance(text, str) or not text.startswith("tpu:"):
        return False
    return text[4:].isdigit() and int(text[4:]) != 0


@rule(
    "tpu-ddp-devices",
    "error",
    what="DistributedDataParallel with `device_ids` or `output_device` of the rank",
    why="each process has one core, which is tpu:0 in all of them: a model on it is not on device "
    "number `rank`: IndexError in the forward pass, ValueError for output_device (torch 2.13; "
    "rehearsed)",
    fix="write `DistributedDataParallel(model)` without device_ids",
    backends=TORCHTPU,
)
def _tpu_ddp_devices(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of(*DDP):
        ids = argument(site.call, "device_ids", 1)
        parts = ids.elts if isinstance(ids, ast.List | ast.Tuple) else []
        output = argument(site.call, "output_device", 2)
        numbered = any(_literal_rank(notebook, part, site) for part in (*parts, output))
        if numbered and not for_other_hardware(site):
            yield Hit(site, "`device_ids` numbers GPUs", certain=True, several=True)


GROUPS = {"xla": "torch_xla's", "mpi": "for CPUs", "gloo": "for CPUs"}
"""Backends of process groups without an operation for TPUs, and what they are for."""


@rule(
    "tpu-group-backend",
    "error",
    what="a process group with the backend xla, gloo or mpi alone, for tensors on a TPU",
    why="RuntimeError or ValueError: the group has no backend for the device tpu (torch 2.13 "
    "distributed_c10d.py; rehearsed)",
    fix="write `init_process_group('tpu_dist')`, or 'cpu:gloo,tpu:tpu_dist' for tensors on the CPU "
    "too",
    backends=TORCHTPU,
)
def _tpu_group_backend(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of(f"{DIST}.init_process_group"):
        backend = literal(argument(site.call, "backend", 0))
        if backend in GROUPS and not _may_be_other(site):
            message = f"the backend {backend!r} is {GROUPS[str(backend)]}"
            yield Hit(site, message, certain=backend == "xla")


@rule(
    "tpu-compile",
    "error",
    what="torch.compile with `mode=`, or with the backend inductor or openxla",
    why="torch_tpu replaces torch.compile: `mode` raises TypeError, inductor RuntimeError on TPU "
    "tensors, and openxla is torch_xla's (read in torch_tpu 0.2.0)",
    fix="write `torch.compile(model)`: the backend for TPUs is the default",
    backends=TORCHTPU,
)
def _tpu_compile(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of("torch.compile"):
        if _may_be_other(site):
            continue
        mode, backend = argument(site.call, "mode"), literal(argument(site.call, "backend"))
        if mode is not None and literal(mode) is not None:
            yield Hit(site, "torch_tpu's torch.compile has no `mode`", certain=True)
        elif backend in ("inductor", "openxla"):
            yield Hit(site, f"the backend {backend!r} does not compile for TPUs")


MISSING = ("reduce", "monitored_barrier")
"""Functions of torch.distributed that torch_tpu's process group does not implement."""


@rule(
    "tpu-collective",
    "error",
    what="dist.reduce or dist.monitored_barrier",
    why="torch_tpu's process group does not implement it: RuntimeError (the library of torch_tpu "
    "0.2.0 has no such function; rehearsed)",
    fix="use dist.all_reduce, which gives the result to all ranks, or dist.barrier",
    backends=TORCHTPU,
)
def _tpu_collective(notebook: NotebookIndex) -> Iterator[Hit]:
    for name in MISSING:
        for site in notebook.calls_of(f"{DIST}.{name}"):
            if argument(site.call, "group") is None and not _may_be_other(site):
                yield Hit(site, f"TorchTPU has no `{name}`", certain=name == "reduce")


REMOVED = {
    "torch_tpu.api": "`torch_tpu.api` does not exist in torch_tpu 0.2.0",
    "torch.tpu.distributed.environment": "`torch.tpu.distributed.environment` does not exist in "
    "torch_tpu 0.2.0",
}
INSTEAD = {
    "torch_tpu.api": "write `torch.device('tpu')`",
    "torch.tpu.distributed.environment": "%%tpu_train sets the variables itself; in a shell, "
    "`python -m torch.tpu.distributed` prints them",
}


@rule(
    "tpu-removed-name",
    "error",
    what="`torch_tpu.api`, or `torch.tpu.distributed.environment`",
    why="older examples use them: ImportError (torch_tpu 0.2.0)",
    fix="write `torch.device('tpu')`; %%tpu_train sets the variables of the ranks",
    backends=TORCHTPU,
    kernel=True,
)
def _tpu_removed_name(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.sites.imports:
        names = {full for _, full in imported(site.node)} | {getattr(site.node, "module", "")}
        names |= {alias.name for alias in site.node.names}  # type: ignore[attr-defined]
        for old, message in REMOVED.items():
            uses = any(f"{name}.".startswith(f"{old}.") for name in names if name)
            if uses and not is_tried(site):
                yield Hit(site, message, INSTEAD[old], certain=True)
    for cell in notebook.cells:
        for line, text in cell.commands():
            if "torch.tpu.distributed.environment" in text and not text.lstrip().startswith("#"):
                old = "torch.tpu.distributed.environment"
                yield Hit((cell, line), REMOVED[old], INSTEAD[old])


MOVED = {
    "is_available": "is_available()",
    "device_count": "device_count()",
    "current_device": "current_device_index()",
    "current_stream": "current_stream()",
    "set_stream": "set_stream(stream)",
    "synchronize": "synchronize()",
}
"""Functions of torch.tpu that are for torch's own use, and those of torch.accelerator."""


@rule(
    "tpu-moved-name",
    "error",
    what="functions of torch.tpu that torch.accelerator has too, as `torch.tpu.is_available()`",
    why="they raise RuntimeError in a user's code unless TORCH_TPU_ALLOW_LEGACY_DEVICE_APIS=1 is "
    "set (torch_tpu 0.2.0; rehearsed)",
    fix="call the function of torch.accelerator",
    backends=TORCHTPU,
    kernel=True,
)
def _tpu_moved_name(notebook: NotebookIndex) -> Iterator[Hit]:
    if any(
        "TORCH_TPU_ALLOW_LEGACY_DEVICE_APIS" in line for c in notebook.cells for line in c.lines
    ):
        return
    for name, new in MOVED.items():
        for site in notebook.calls_of(f"torch.tpu.{name}"):
            if not is_tried(site):
                message = f"`torch.tpu.{name}` is for torch's own use: RuntimeError"
                yield Hit(site, message, f"write `torch.accelerator.{new}`", certain=True)


TENSORS = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_to_all_single")
MAKERS = ("tensor", "zeros", "ones", "full", "empty", "rand", "randn", "arange")


@rule(
    "tpu-group-cpu-tensor",
    "error",
    what="a tensor on the CPU in a collective of a process group with the backend tpu_dist",
    why="RuntimeError: No backend type associated with device type cpu (torch 2.13; rehearsed)",
    fix="move it to the TPU first, or write `init_process_group('cpu:gloo,tpu:tpu_dist')`",
    backends=TORCHTPU,
)
def _tpu_group_cpu_tensor(notebook: NotebookIndex) -> Iterator[Hit]:
    starts = list(notebook.calls_of(f"{DIST}.init_process_group"))
    backends = {literal(argument(site.call, "backend", 0)) for site in starts}
    if not starts or not backends <= {"tpu_dist", "tpu"} or "set_default_device" in notebook.called:
        return
    for site in notebook.calls_of(*(f"{DIST}.{name}" for name in TENSORS)):
        if argument(site.call, "group") is not None or not site.call.args:
            continue
        given = site.call.args[0]
        values = values_of(notebook, given, site)
        changed = isinstance(given, ast.Name) and _is_changed(notebook, given.id, site)
        if values and not changed and all(_is_on_cpu(notebook, value) for value in values):
            yield Hit(site, "this tensor is on the CPU, and the group is for TPUs only")


def _is_on_cpu(notebook: NotebookIndex, value: Site) -> bool:
    """Whether a value is a new tensor without a device."""
    node = value.node
    if not isinstance(node, ast.Call) or has_spread(node):
        return False
    makes = notebook.full(node.func, value) in {f"torch.{name}" for name in MAKERS}
    inside_with = any(isinstance(frame.node, ast.With) for frame in value.frame.outward())
    device = argument(node, "device")
    return makes and not inside_with and (device is None or literal(device) == "cpu")


def _is_changed(notebook: NotebookIndex, name: str, site: Site) -> bool:
    """Whether a name is also bound otherwise: by a loop, a parameter, `+=`."""
    bindings = notebook.sites.bindings(name, site.scope)
    return len(bindings) != len(notebook.values(name, site.frame))


@rule(
    "tpu-loader-workers",
    "warning",
    what="a DataLoader with worker processes in a notebook that uses the TPU",
    why="workers are forked from the process that holds the TPU: they may deadlock, and a tensor "
    "on the TPU in one of them raises 'cannot access or re-initialize TPU in a forked subprocess' "
    "(torch_tpu 0.2.0; Google's training examples keep num_workers=0)",
    fix="write num_workers=0",
    backends=TORCHTPU,
)
def _tpu_loader_workers(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.data_loaders:
        count = constant(notebook, argument(site.call, "num_workers", 5), site)
        context = argument(site.call, "multiprocessing_context", 10)
        forked = context is None or literal(context) in (None, "fork")
        if type(count) is int and count > 0 and forked and notebook.in_rank(site):
            yield Hit(site, f"{count} workers are forked from a process that holds the TPU")
