"""%%tpu_debug without torch_xla: its options, and what it leaves behind, in a real kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.torchtpu.debugged import PRELUDE
from tests.drivers.kernel import Kernel, kernel

LOOP = """
model, opt = make()
ended = []
for step in range(1000):
    x = rows().to(device)
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    ended.append(step)
    value = loss.item()
after = True
"""
STATE = """
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes
from torch._dynamo.callback import callback_handler
import os
(modes(), len(hooks), torch.Tensor.__repr__.__qualname__, "RANK" in os.environ,
 len(callback_handler.start_callbacks),
 type(torch.autograd.Variable._execution_engine).__name__,
 torch.distributed.is_initialized())
"""


@pytest.fixture(scope="module")
def nb(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("cell"), file="a.ipynb") as notebook:
        notebook.run("%load_ext tpunb").good()
        notebook.run(PRELUDE).good()
        yield notebook


def test_steps_end_a_loop_after_the_rest_of_its_body(nb: Kernel) -> None:
    ran = nb.run(f"%%tpu_debug --steps 4\nafter = False{LOOP}").good()
    assert ran.stdout == "stopped after 4 steps (--steps)\n"
    assert nb.value("ended, after, isinstance(value, float)") == ([0, 1, 2, 3], False, True)
    assert "4 steps of" in ran.status
    assert "reads a value from the device, at every step" in ran.status


def test_a_profile_is_refused(nb: Kernel) -> None:
    ran = nb.run(f"%%tpu_debug --profile{LOOP}")
    assert "UsageError: %%tpu_debug --profile writes a trace of torch_xla" in ran.stderr
    assert "torch.profiler" in ran.stderr


def test_nothing_of_xla_is_printed_or_imported(nb: Kernel) -> None:
    assert "XLA" not in nb.run(f"%%tpu_debug --steps 2{LOOP}").good().screen()
    assert nb.value("[name for name in __import__('sys').modules if 'torch_xla' in name]") == []


def test_everything_is_as_before_after_it(nb: Kernel) -> None:
    nb.run("torch.compile(lambda x: x + 1)(torch.ones(1, device=device))").good()
    expected = nb.run(STATE).good().shown
    group = "import torch.distributed as dist\ndist.init_process_group('tpu_dist')\n"
    nb.run(f"%%tpu_debug --nan --steps 3\n{group}{LOOP}").good()
    assert "ZeroDivisionError" in nb.run(f"%%tpu_debug --nan\n{group}1 / 0").traceback
    ran = nb.send("%%tpu_debug\nprint('begun')\nwhile True:\n    rows().to(device).sum()")
    nb.until(ran, "begun")
    nb.interrupt()
    assert "KeyboardInterrupt" in nb.wait(ran).traceback
    assert nb.run(STATE).good().shown == expected


def test_torch_compile_does_the_same_as_without_it(nb: Kernel) -> None:
    """The recorder adds no graph break, no compilation and no recompilation of its own."""
    cell = (
        "import torch._dynamo\nfrom torch._dynamo.utils import counters\n"
        "def other(x, number):\n    y = x * number\n    if y.sum().item() > 0:\n        y = y + 1\n"
        "    return y.sin()\n"
        "torch._dynamo.reset()\ncounters.clear()\nfast = torch.compile(other)\n"
        "for number in (1, 2):\n    for n in (3, 4, 3):\n"
        "        x = torch.ones(n, device=device, requires_grad=True)\n"
        "        fast(x, number).sum().backward()\n"
        "seen = {name: sorted(counters[name].items()) for name in ('stats', 'graph_break')}\n"
    )
    nb.run(cell).good()
    expected = nb.value("seen")
    assert expected["stats"]
    ran = nb.run(f"%%tpu_debug\n{cell}").good()
    assert nb.value("seen") == expected
    assert "torch.compile recompiled `other`" in ran.status
    nb.run(cell).good()  # the mode is not a guard either
    assert nb.value("seen") == expected


def test_the_limit_of_recompilations_is_named(nb: Kernel) -> None:
    cell = (
        "@torch.compile\ndef double(x):\n    return x * 2\n"
        "for n in range(2, 14):\n    double(torch.ones(n, device=device))\n"
    )
    status = nb.run(f"%%tpu_debug\n{cell}").good().status
    assert "7 times" in status
    assert "expected 2, actual 3" in status
    assert "the limit is reached" in status


def test_a_cell_for_torch_xla_is_refused_with_the_reason(nb: Kernel) -> None:
    nb.run("%tpu_setup --backend xla --no-warm").good()
    ran = nb.run("%%tpu_debug\nimport torch_xla")
    assert "torch_xla is needed for %%tpu_debug (%tpu_setup --backend xla)" in ran.screen()
    nb.run("%tpu_setup --backend auto --no-warm").good()
