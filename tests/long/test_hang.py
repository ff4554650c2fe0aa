"""More of tests/scenarios/test_hang.py, which takes longer."""

from __future__ import annotations

from pathlib import Path

from tests.scenarios.test_hang import LOOP, SILENT_WORK
from tests.support import Driver
from tpunb.runs.events import Note


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


ELSEWHERE = LOOP.format(one="while not os.path.exists('told'): time.sleep(0.1)")


def test_long_wait_in_a_collective_is_noted_while_the_run_continues(
    driver: Driver, tmp_path: Path
) -> None:
    seen = driver.run(
        [],
        ELSEWHERE,
        ranks=3,
        when=lambda event: isinstance(event, Note),
        then=lambda run: (tmp_path / "told").touch(),
        cwd=str(tmp_path),
    )
    assert seen.result.state == "succeeded"
    (note,) = seen.of(Note)
    assert note.text.startswith("waiting in a collective for 15 s: 0,2; not in it: 1\n")
    assert "ranks 0, 2: in xm.all_reduce, cell [1], line 5: total = xm.all_reduce(" in note.text
    assert "rank 1: at cell [1], line 8: while not os.path.exists(" in note.text
