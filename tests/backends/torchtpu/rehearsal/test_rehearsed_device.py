"""Tensors of the device are torch's own: types, errors, views, gradients, files, processes."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import sys
import threading
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tpunb
from tpunb.utils.errors import SetupError

OURS = str(Path(tpunb.__file__).parent)


def test_a_tensor_is_on_the_device() -> None:
    import torch

    from tpunb.backends.torchtpu.rehearsal.rehearsed_device import (
        is_installed,
        on_tpu,
        to_cpu,
        to_tpu,
    )

    x = torch.ones(3, device="tpu")
    assert is_installed()
    assert (x.device.type, x.is_tpu, x.is_cpu, on_tpu(x)) == ("tpu", True, False, True)
    alias = to_cpu(x)
    alias.add_(1)
    assert x.tolist() == [2, 2, 2]
    assert to_tpu(alias).data_ptr() == x.data_ptr() == alias.data_ptr()


def test_install_refuses_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from tpunb.backends.torchtpu.rehearsal import rehearsed_device

    rehearsed_device.install()  # does nothing the second time
    monkeypatch.setattr(rehearsed_device, "_kept", [])
    with pytest.raises(SetupError, match="TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        rehearsed_device.install()
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    with pytest.raises(SetupError, match=r"needs torch 2\.11 or later, and this is 2\.9\.0"):
        rehearsed_device.install()


def test_importing_and_installing_import_no_compiler(starts_processes: None) -> None:
    import subprocess

    code = (
        "import sys\n"
        "from tpunb.backends.torchtpu.rehearsal.rehearsed_device import install\n"
        "install()\n"
        "import torch\ntorch.ones(2, device='tpu').add(1)\n"
        "assert not {'torch._dynamo', 'torch_xla'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_backward_pass_runs_in_the_thread_that_asks_for_it() -> None:
    import torch

    leaf, threads = torch.ones(2, device="tpu", requires_grad=True), list[int]()
    leaf.register_hook(lambda gradient: threads.append(threading.get_ident()))
    (leaf * 2).sum().backward()
    assert threads == [threading.get_ident()]


def mixed() -> list[Callable[[], Any]]:
    import torch
    from torch import nn

    x = torch.ones(3, device="tpu")
    return [
        lambda: x + torch.ones(3),
        lambda: torch.ones(3) + x,
        lambda: torch.ones(3, 3) @ x,
        lambda: torch.cat([x, torch.ones(3)]),
        lambda: x.add_(torch.ones(3)),
        lambda: nn.Linear(3, 2)(x),
        lambda: nn.Linear(3, 2).to("tpu")(torch.ones(3)),
        lambda: torch._foreach_add([x], [torch.ones(3)]),
    ]


def test_mixed_devices_raise_at_the_line() -> None:
    import torch

    for call in mixed():
        with pytest.raises(RuntimeError, match=re.escape('Move it with .to("tpu")')) as caught:
            call()
        files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
        others = [f for f in files if "site-packages/torch/" not in f and not f.startswith(OURS)]
        assert others[-1] == __file__
        assert len(files) < 10
    assert (torch.ones(2, device="tpu") + torch.tensor(1.0)).tolist() == [2, 2]


def test_reading_and_second_devices_raise() -> None:
    import torch

    x = torch.ones(3, device="tpu")
    with pytest.raises(TypeError, match="tpu:0 device type tensor to numpy"):
        x.numpy()
    for call in (
        lambda: x.to("tpu:1"),
        lambda: torch.zeros(2, device="tpu:1"),
        lambda: torch.ones(2).to("tpu:1"),
    ):
        with pytest.raises(RuntimeError, match="each process has one TPU core"):
            call()


def test_views_share_memory_and_versions() -> None:
    import torch

    x = torch.zeros(4, device="tpu")
    v = x.view(2, 2)
    x[1:].add_(1)
    assert v.tolist() == [[0, 1], [1, 1]]
    assert v._base is x
    assert v._version == x._version == 1
    x.t_().unsqueeze_(0).squeeze_(0).resize_(2)
    assert x.tolist() == [0, 1]


def test_writes_to_overlapping_memory_raise() -> None:
    import torch

    x = torch.arange(5.0, device="tpu")
    for write in (lambda: x[1:].add_(x[:-1]), lambda: x[1:].copy_(x[:-1])):
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            write()
    assert x.add_(x).tolist() == [0, 2, 4, 6, 8]


def test_version_counters_protect_gradients() -> None:
    import torch

    for change in (lambda u: u.add_(1), lambda u: torch._foreach_add_([u], 1)):
        u = torch.ones(3, device="tpu", requires_grad=True) * 2
        loss = (u * u).sum()
        with torch.no_grad():
            change(u)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_data_and_parameters_can_be_replaced() -> None:
    import torch
    from torch import nn

    p = nn.Parameter(torch.ones(3, device="tpu"))
    assert (p * 1).shape == (3,)
    p.data = torch.zeros(5, device="tpu")
    assert (p * 1).tolist() == [0] * 5
    p.data = p.data.double()
    assert (p + 1).dtype is torch.float64


def test_gradients() -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    x = torch.full((3,), 2.0, device="tpu", requires_grad=True)
    seen: list[str] = []
    x.register_hook(lambda g: seen.append(g.device.type))
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    first.sum().backward()
    assert x.grad is not None
    assert (first.tolist(), x.grad.tolist()) == ([12] * 3, [12] * 3)
    assert set(seen) == {"tpu"}
    for reentrant in (True, False):
        x.grad = None
        checkpoint(lambda t: (t * t).sum(), x, use_reentrant=reentrant).backward()
        assert x.grad.tolist() == [4] * 3
    batched = torch.vmap(torch.func.grad(lambda t: (t**2).sum()))(x.detach().expand(2, 3))
    assert batched.tolist() == [[4] * 3] * 2


def test_threads_and_inference_mode() -> None:
    import torch

    found: list[Any] = []

    def train() -> None:
        w = torch.ones(3, device="tpu", requires_grad=True)
        (w * 2).sum().backward()
        assert w.grad is not None
        with torch.autocast("tpu"):
            found.append((w.grad.tolist(), (w @ w).dtype))

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [([2, 2, 2], torch.bfloat16)] * 3
    with torch.inference_mode():
        x = torch.ones(3, device="tpu").mul_(2)
        torch._foreach_add_([x], 1)
    assert x.is_inference()
    assert x.tolist() == [3] * 3


def test_default_device() -> None:
    import torch
    from torch import nn

    with torch.device("tpu"):
        made = [torch.rand(2), torch.tensor([1]), torch.empty(2), nn.Linear(2, 2).weight]
        made.append(nn.Linear(2, 2)(torch.randn(3, 2)))
        made[-1].sum().backward()
    assert {value.device.type for value in made} == {"tpu"}
    assert torch.ones(1).device.type == "cpu"


@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage")
def test_files(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file
    from torch import nn

    model = nn.Linear(3, 2).to("tpu")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for where, expected in ((None, "tpu"), ("cpu", "cpu"), ("tpu", "tpu"), ("meta", "meta")):
        file.seek(0)
        state = torch.load(file, map_location=where)
        assert {value.device.type for value in state.values()} == {expected}
    file = io.BytesIO()
    torch.save(torch.ones(3), file)
    file.seek(0)
    assert torch.load(file, map_location="tpu").tolist() == [1, 1, 1]
    assert copy.deepcopy(model).weight.device.type == "tpu"
    assert pickle.loads(pickle.dumps(model.weight)).device.type == "tpu"
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["bias"], model.bias.cpu())
    dcp.save({"m": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
    state = {"m": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(state["m"]["weight"], model.weight)


@pytest.mark.parametrize("pin", [False, True])
def test_loader_workers(pin: bool, starts_processes: None) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(8.0))
    total = torch.zeros((), device="tpu")
    for (x,) in DataLoader(data, batch_size=4, num_workers=2, pin_memory=pin):
        assert x.is_pinned() == pin
        total += x.to("tpu", non_blocking=True).sum()
    assert total.item() == 28


def test_tensors_of_the_device_cannot_be_sent(starts_processes: None) -> None:
    import torch
    from torch.utils.data import DataLoader

    values = [torch.ones(2, device="tpu")] * 2
    loader = DataLoader(values, batch_size=None, num_workers=1)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="cannot be sent to another process"):
        list(loader)


def test_a_fork_has_the_device(starts_processes: None) -> None:
    code = """
import os, torch
from tpunb.backends.torchtpu.rehearsal.rehearsed_device import install
install()
x = torch.ones(4, device="tpu")
y = x @ x
pid = os.fork()
if not pid:
    w = torch.ones(4, device="tpu", requires_grad=True)
    (w * x).sum().backward()
    os._exit(0 if w.grad.tolist() == [1] * 4 and y.item() == 4 else 1)
assert os.waitpid(pid, 0)[1] == 0
"""
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_stays_flat() -> None:
    import torch
    from torch import nn

    model = nn.Linear(500, 500).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters())

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.randn(8, 500, device="tpu")).sum().backward()
            optimizer.step()

    steps(5)
    before = _resident()
    steps(60)  # of 1 MB of weights, as many gradients, and three temporary values
    assert _resident() - before < 30 << 20


@pytest.fixture
def stand_in() -> types.ModuleType:
    import torch_tpu

    return torch_tpu  # type: ignore[no-any-return]


def test_importing_torch_tpu_is_harmless(stand_in: types.ModuleType) -> None:
    import importlib.util

    assert importlib.util.find_spec("torch_tpu") is not None
    assert not hasattr(stand_in, "__file__")
