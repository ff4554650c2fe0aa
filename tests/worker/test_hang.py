"""Runs in which nothing goes on any more, and runs that only look like it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import Driver
from tpunb.errors import RunHungError
from tpunb.events import Phase, RanksStarted

RANK = "import os, time, torch, torch_xla\nrank = int(os.environ['RANK'])"
LOOP = """\
import os, time, torch, torch_xla
import torch_xla.core.xla_model as xm
rank, device = int(os.environ["RANK"]), torch_xla.device()
for step in range(5):
    total = xm.all_reduce("sum", torch.ones(3, device=device))
    torch_xla.sync()
    if rank == 1 and step == 3:
        {one}
print("done", rank)
"""

# Hang time-outs here are some seconds: ranks on a busy machine need more than one to begin.


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    made = Driver(tmp_path_factory.mktemp("runs"))
    made.warm()
    yield made
    made.launcher.close()


def stacks(folder: Path, rank: int) -> str:
    return (folder / "attempts" / "0" / str(rank) / "stacks.txt").read_text()


@pytest.mark.slow
def test_who_waits_where_and_who_is_elsewhere(driver: Driver) -> None:
    seen = driver.run([], LOOP.format(one="time.sleep(1000)"), ranks=3, hang_timeout=6.0, grace=1.0)
    result = seen.result
    assert (result.state, result.returncode) == ("hung", 124)
    text = result.explain()
    assert text.startswith("no rank has shown a sign of life for 6 s")
    assert "ranks 0, 2: in xm.all_reduce, cell [1], line 5: total = xm.all_reduce(" in text
    assert "rank 1: at cell [1], line 8: time.sleep(1000)" in text
    assert "--hang-timeout" in text
    assert result.failure is not None
    assert (result.failure.type, result.failure.cell, result.failure.line) == ("Hang", 1, 5)
    with pytest.raises(RunHungError, match="rank 1: at cell"):
        result.raise_for_failure()
    for rank in range(3):
        assert "script.py" in stacks(result.dir, rank)
    assert any("reading the stacks" in phase.text for phase in seen.of(Phase))
    assert driver.run([], "print('next')").result.state == "succeeded"


@pytest.mark.slow
def test_ranks_in_c_code_are_seen_and_ended(driver: Driver) -> None:
    # It holds the interpreter's lock, so that no Python of this process runs any more.
    busy = "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')"
    seen = driver.run([], busy, hang_timeout=4.0, grace=0.5)
    assert seen.result.state == "hung"
    assert "ranks 0, 1: in re" in seen.result.explain()
    assert "cell [1], line 2: re.match(" in seen.result.explain()


@pytest.mark.slow
def test_a_stopped_rank_is_named(driver: Driver) -> None:
    def stop(run: object) -> None:
        os.kill(pids[1], signal.SIGSTOP)

    pids: list[int] = []

    def started(event: object) -> bool:
        if isinstance(event, RanksStarted):
            pids.extend(event.pids)
        return isinstance(event, RanksStarted)

    loop = "import time\nwhile True:\n    time.sleep(0.1)"
    seen = driver.run([], loop, when=started, then=stop, hang_timeout=2.0, grace=0.5)
    assert seen.result.state == "hung"
    assert "rank 1: is stopped (SIGSTOP, or a debugger)" in seen.result.explain()


@pytest.mark.slow
@pytest.mark.parametrize(
    "alive",
    [
        "for _ in range(12):\n    time.sleep(0.5)\n    print('.', end='', flush=True)",
        "import tpunb\nfor i in range(12):\n    time.sleep(0.5)\n    tpunb.log(step=i, loss=1.0)",
        "x = torch.ones(2, device='xla', requires_grad=True)\n(x * x).sum().backward()\n"
        "for _ in range(12):\n    time.sleep(0.5)\n    torch_xla.sync()",
        "from pathlib import Path\nfolder = Path(os.environ['TPUNB_RUN'], 'checkpoints')\n"
        "folder.mkdir(exist_ok=True)\nfor i in range(12):\n    time.sleep(0.5)\n"
        "    (folder / 'part').write_bytes(bytes(i))",
        "import torch_xla.core.xla_model as xm\nfor _ in range(12):\n    time.sleep(0.5)\n"
        "    xm.rendezvous('here')",
    ],
    ids=["line", "metric", "step", "checkpoint", "collective"],
)
def test_any_sign_of_life_will_do(driver: Driver, alive: str) -> None:
    seen = driver.run([], f"{RANK}\n{alive}", ranks=2, hang_timeout=4.0)
    assert seen.result.state == "succeeded"


@pytest.mark.slow
def test_a_long_compilation_is_no_hang(driver: Driver) -> None:
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


@pytest.mark.slow
def test_nothing_is_expected_of_the_prelude_or_with_0(driver: Driver) -> None:
    quiet = "import time\ntime.sleep(4.5)"
    for replicate in (None, "asked for"):
        seen = driver.run([quiet], "print('here')", hang_timeout=3.0, replicate=replicate)
        assert seen.result.state == "succeeded"
    assert driver.run([], quiet, hang_timeout=0.0).result.state == "succeeded"
