"""Each private name that is replaced or read is there, with the signature that it is used by."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator

import pytest

from tests.worker.ranks import Ranks, rehearse, warm
from tpunb.worker import xla_patches

SIGNATURES = """
_check_tensor_need_materialization(list[torch.Tensor]) -> list[bool]
_from_dlpack(object) -> torch.Tensor
_get_allow_execution() -> bool
_get_graph_hash(list[torch.Tensor]) -> bytes
_get_tensors_handle(list[torch.Tensor]) -> list[int]
_get_xla_tensors_text(list[torch.Tensor]) -> str
_set_all_reduce_token(str, _XLAC.IrValue) -> None
_set_allow_execution(bool) -> None
_to_dlpack(torch.Tensor) -> object
_xla_all_gather(torch.Tensor, int, int, list, bool, Optional[int], Optional[bool]) -> torch.Tensor
_xla_all_gather_coalesced(list[torch.Tensor], _XLAC.IrValue, int, int, list, bool) -> list
_xla_all_gather_coalesced_out(list[torch.Tensor], list[torch.Tensor], _XLAC.IrValue, int, int, \
list, bool) -> _XLAC.IrValue
_xla_all_gather_out(torch.Tensor, torch.Tensor, _XLAC.IrValue, int, int, list, bool) \
-> _XLAC.IrValue
_xla_all_reduce(str, torch.Tensor, float, list, bool) -> torch.Tensor
_xla_all_reduce_inplace(str, list[torch.Tensor], float, list, bool) -> None
_xla_all_to_all(torch.Tensor, _XLAC.IrValue, int, int, int, list, bool) -> tuple
_xla_collective_permute(torch.Tensor, _XLAC.IrValue, list) -> tuple
_xla_force_spmd_device() -> None
_xla_get_all_device_attributes() -> list[dict]
_xla_get_all_devices() -> list[str]
_xla_get_all_runtime_devices() -> list[str]
_xla_get_cpu_tensors(list[torch.Tensor]) -> list[torch.Tensor]
_xla_get_default_device_ordinal() -> int
_xla_get_device_ordinal(str) -> int
_xla_get_devices() -> list[str]
_xla_get_num_processes() -> int
_xla_get_process_index() -> int
_xla_get_replication_devices() -> list[str]
_xla_get_replication_devices_count() -> int
_xla_get_spmd_config_is_locked() -> bool
_xla_increment_counter(str, int) -> None
_xla_mark_sharding(torch.Tensor, _XLAC.OpSharding) -> None
_xla_memory_info(str) -> dict
_xla_num_devices() -> int
_xla_num_global_devices() -> int
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
_xla_set_replication_devices(list[str]) -> None
_xla_spmd_all_reduce(str, torch.Tensor, float, list) -> torch.Tensor
_xla_spmd_reduce_scatter(str, torch.Tensor, float, int, int, list) -> torch.Tensor
_xla_step_marker(device: str = '', devices: list[str], wait: bool = True, \
reset_scope: bool = True) -> None
_xla_wait_device_ops(devices: list[str]) -> None
_xla_sync_live_tensors(device: str = '', devices: list[str], wait: bool = True) -> None
_c10d_functional::all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor
_c10d_functional::all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor
_c10d_functional::all_to_all_single(Tensor input, SymInt[] output_split_sizes, \
SymInt[] input_split_sizes, str group_name) -> Tensor
_c10d_functional::reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, \
str group_name) -> Tensor
torch.distributed.rendezvous._create_c10d_store(hostname, port, rank, world_size, timeout, \
use_libuv)
torch_xla._dynamo.dynamo_bridge.extract_compiled_graph_helper(xla_model, xla_args)
torch_xla._internal.pjrt.run_multiprocess(fn, args, start_method, kwargs)
torch_xla._internal.pjrt.spawn(fn, nprocs, start_method, args)
torch_xla._internal.tpu.num_available_devices()
torch_xla.core.xla_model._all_gather_using_all_reduce(value, dim, groups, pin_layout)
torch_xla.core.xla_model.xla_rendezvous(payload, ordinals, tag)
""".strip().splitlines()
"""As torch 2.8 and 2.9, torch_xla 2.8 and 2.9 have them, written the same way."""

NO_FUNCTIONS = {
    "torch.distributed.rendezvous._rendezvous_handlers",
    "torch_xla.distributed.parallel_loader.ParallelLoader",
    "torch_xla.runtime._ORDINAL",
    "torch_xla.runtime._WORLD_SIZE",
    "torch_xla.torch_xla.dist",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with warm(tmp_path_factory.mktemp("ranks")) as started:
        yield started


def _written(name: xla_patches.Name) -> str:
    """The signature of a name; '' for what is no function."""
    import torch
    import torch_xla

    if name.owner == xla_patches.OPS:
        return str(getattr(torch.ops._c10d_functional, name.name).default._schema)
    if name.owner != xla_patches.XLAC:
        full = f"{name.owner}.{name.name}"
        found = getattr(importlib.import_module(name.owner), name.name)
        return "" if full in NO_FUNCTIONS else f"{full}({_parameters(found)})"
    text = getattr(torch_xla._XLAC, name.name).__doc__.partition("\n")[0]
    # pybind11 of torch_xla 2.9 says the same in other words than that of 2.8.
    for new, old in (("SupportsInt", "int"), ("SupportsFloat", "float")):
        text = text.replace(f"typing.{new}", old)
    text = text.replace("collections.abc.Sequence", "list")
    return re.sub(r"arg\d: ", "", re.sub(r"(\w+) \| None", r"Optional[\1]", text))


def _parameters(function: Callable[..., object]) -> str:
    return ", ".join(inspect.signature(function).parameters)


def signatures() -> list[str]:
    import torch_xla._dynamo.dynamo_bridge
    import torch_xla.core.xla_model  # noqa: F401

    own = [name for name in xla_patches.NAMES if name.owner.split(".")[0] in OWNERS]
    return [written for name in own if (written := _written(name))]


OWNERS = ("torch_xla", "torch", xla_patches.OPS)
"""Whose names are looked at here. Those of other libraries: tests/test_frameworks.py."""


def test_signatures_are_those_that_were_looked_up(ranks: Ranks) -> None:
    (found,) = ranks.values(signatures, 1)
    assert len(found) > 40
    assert sorted(set(found) - set(SIGNATURES)) == [], "new or changed: look them up in 2.8 and 2.9"


def parameters() -> dict[str, tuple[int, int]]:
    """How many upstream's functions have and how many their stand-ins."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    theirs = {line.partition("(")[0]: line for line in signatures()}
    rehearse()
    found = {}
    for name in xla_patches.named("collective", xla_patches.XLAC):
        given = theirs[name].partition("(")[2].partition(") ->")[0]
        own = inspect.signature(getattr(torch_xla._XLAC, name)).parameters
        found[name] = given.count(",") + 1, len(own)
    for name in xla_patches.named("collective", "torch_xla.core.xla_model"):
        given = theirs[f"torch_xla.core.xla_model.{name}"].partition("(")[2]
        own = inspect.signature(getattr(xm, name)).parameters
        assert given == f"{_parameters(getattr(xm, name))})"
        found[name] = given.count(",") + 1, len(own)
    assert torch.ops._c10d_functional.all_reduce is not None
    return found


def test_stand_ins_take_what_is_passed(ranks: Ranks) -> None:
    (found,) = ranks.values(parameters, 1)
    assert len(found) >= 14
    for name, (theirs, own) in found.items():
        assert theirs == own, name


def unknown() -> list[str]:
    import torch
    import torch_xla
    import torch_xla._dynamo.dynamo_bridge

    known = {name.name for name in xla_patches.NAMES}
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
    for name in xla_patches.NAMES:
        if name.owner == xla_patches.OPS:
            assert f"{name.owner}::{name.name}" in registered
    # broadcast is torch_xla's own Python code on top of xm.all_reduce.
    return sorted(set(found) - known - {"broadcast"})


def test_no_collective_of_torch_xla_is_unknown(ranks: Ranks) -> None:
    assert ranks.values(unknown, 1) == [[]]
