"""The options and messages of %%tpu_debug, in a real kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.diagnostics.cell.programs import PRELUDE
from tests.drivers.kernel import Kernel, kernel

pytestmark = pytest.mark.usefixtures("lent")

LOOP = """
model, opt = make()
ended = []
for step in range(1000):
    x = rows().to(device)
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    xm.optimizer_step(opt)
    torch_xla.sync()
    ended.append(step)
    value = loss.item()
after = True
"""


@pytest.fixture(scope="module")
def nb(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("cell")
    with kernel(folder, file="a.ipynb") as notebook:
        notebook.run(f"%load_ext tpunb\n%tpu_setup --no-warm\n{PRELUDE}").good()
        yield notebook


def test_steps_end_a_loop_after_the_rest_of_its_body(nb: Kernel) -> None:
    ran = nb.run(f"after = False\n{LOOP}".replace("range(1000)", "range(2)")).good()
    ran = nb.run(f"%%tpu_debug --steps 4\nafter = False{LOOP}").good()
    assert ran.stdout == "stopped after 4 steps (--steps)\n"
    assert nb.value("ended, after, isinstance(value, float)") == ([0, 1, 2, 3], False, True)
    assert "4 steps of" in ran.status
    assert ".item() reads a value from the device, at every step" in ran.status


def test_the_stop_is_printed_above_the_report(nb: Kernel) -> None:
    printed = (
        "from tpunb.diagnostics.cell import DebugSettings, run_cell\n"
        f"run_cell(get_ipython(), {LOOP!r}, DebugSettings(report=print, steps=4))"
    )
    stopped, report = nb.run(printed).good().stdout.splitlines()[:2]
    assert stopped == "stopped after 4 steps (--steps)"
    assert report.startswith("%%tpu_debug: ")


@pytest.mark.parametrize(
    ("loop", "steps"),
    [
        ("for x, in pl.MpDeviceLoader(data, device):\n    train(x)", 3),
        ("torch_xla.launch(lambda index: [train(x.to(device)) for x, in data])", 3),
        ("for x, in data:\n    train(x.to(device))\n    torch_xla.sync()", 3),
    ],
    ids=["loader", "without a marker", "function"],
)
def test_steps_of_other_loops(nb: Kernel, loop: str, steps: int) -> None:
    nb.run(
        "model, opt = make()\ndata = DataLoader(TensorDataset(rows(160)), 16)\n"
        "def train(x):\n    opt.zero_grad()\n    model(x).square().mean().backward()\n"
        "    xm.optimizer_step(opt)\n    done.append(len(done))\n"
    ).good()
    ran = nb.run(f"%%tpu_debug --steps {steps}\ndone = []\n{loop}").good()
    assert f"stopped after {steps} steps" in ran.stdout
    assert nb.value("done") == list(range(steps))


def test_no_report(nb: Kernel) -> None:
    ran = nb.run(f"%%tpu_debug --no-report --steps 3{LOOP}").good()
    assert ran.displays == {}
    assert ran.stdout == "stopped after 3 steps (--steps)\n"


def test_a_trace_is_written_next_to_the_runs(nb: Kernel) -> None:
    ran = nb.run(f"%%tpu_debug --profile --steps 3{LOOP}").good()
    [trace] = nb.folder.glob("runs/profile-*/plugins/profile/*/*.xplane.pb")
    assert trace.stat().st_size > 0
    assert f"xprof --logdir {trace.parents[3]}" in ran.stdout
    assert "profile-" not in nb.run("%tpu_runs").good().screen()


def test_a_cell_that_fails_has_a_report_only_if_there_are_findings(nb: Kernel) -> None:
    # The error is one on the CPU: at shapes that do not fit torch_xla 2.8 aborts the process.
    ran = nb.run("%%tpu_debug\nx = rows().to(device) * 2\nrows() @ rows()")
    assert ran.error is not None
    assert ran.displays == {}
    failing = LOOP.replace("    value", "    assert step < 5\n    value")
    ran = nb.run(f"%%tpu_debug{failing}")
    assert "AssertionError" in ran.traceback
    assert ".item() reads a value" in ran.status


def test_everything_is_as_before_after_it(nb: Kernel) -> None:
    look = (
        "import torch_xla\nfrom torch.optim.optimizer import _global_optimizer_pre_hooks as hooks\n"
        "(torch_xla._XLAC._xla_step_marker.__name__, xm.reduce_gradients.__module__, "
        "torch.overrides._get_current_function_mode_stack(), "
        "len(hooks))"
    )
    expected = nb.run(look).good().shown
    assert expected == "('_xla_step_marker', 'torch_xla.core.xla_model', [], 0)"
    nb.run(f"%%tpu_debug --nan --steps 3{LOOP}").good()
    nb.run("%%tpu_debug --nan\n1 / 0")
    assert nb.run(look).good().shown == expected


def test_wrong_options(nb: Kernel) -> None:
    for option in ("--steps 0", "--steps many", "--wrong"):
        assert "UsageError" in nb.run(f"%%tpu_debug {option}\n1").stderr
