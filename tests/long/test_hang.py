"""More of tests/scenarios/test_hang.py, which takes longer."""

from __future__ import annotations

from pathlib import Path

from tests.scenarios.test_hang import SILENT_WORK
from tests.support import Driver


def test_no_hang_during_silent_work(driver: Driver, tmp_path: Path) -> None:
    """A loop that is tracked, computing, a slow disk, and a thread at the end of the run."""
    seen = driver.run(
        [], SILENT_WORK, ranks=2, hang_timeout=3.0, returns=("values",), cwd=str(tmp_path)
    )
    assert seen.result.state == "succeeded", seen.result.explain()


def test_no_hang_during_a_long_compilation(driver: Driver) -> None:
    large = """
        import torch, torch_xla
        x = torch.rand(64, 64, device=torch_xla.device(), requires_grad=True)
        y = x
        for i in range(450):
            y = torch.tanh(y @ x + float(i)) * 1.0001 - y.mean(dim=i % 2, keepdim=True)
            print(i, flush=True)  # it lives: what follows is silent
        y.sum().backward()
        torch_xla.sync()
        print("took long", flush=True)
    """
    seen = driver.run([], large, ranks=1, hang_timeout=3.0)
    assert seen.result.state == "succeeded"
    assert seen.seconds > 4.0, "compiled too quickly to show anything"
