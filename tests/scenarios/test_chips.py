"""What the chips of a run do: on its card, in its summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fakes.libtpu import FakeChip, ports_of, serving
from tests.support import Driver
from tpunb.display.status import RunStatus
from tpunb.runs import chips
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Event, RankSnapshots
from tpunb.worker.supervisor.chip_meter import PORTS

GB = 10**9
TRAIN = """
    import os, pathlib, time, torch, torch_xla
    from torch.utils.data import DataLoader

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 10_000
        def __getitem__(self, index):
            time.sleep(0.02)
            return torch.zeros(2)

    weight = torch.ones(2, device=torch_xla.device(), requires_grad=True)
    go = pathlib.Path(os.environ["TPUNB_RUN"], "go")
    for batch in DataLoader(Slow(), batch_size=2):
        (weight * batch.to(torch_xla.device())).sum().backward()
        torch_xla.sync()
        if go.exists():
            break
"""


def test_chip_usage_on_the_card_and_in_the_run_summary(driver: Driver) -> None:
    def busy(event: Event) -> bool:
        return isinstance(event, RankSnapshots) and any(
            chip.mean_duty is not None for chip in event.chips
        )

    def go_on(run: Any) -> None:
        (run.dir.path / "go").touch()

    with serving([FakeChip(3 * GB, 31.0), FakeChip(5 * GB, 33.0)]) as servers:
        env = {PORTS: ports_of(servers)}
        seen = driver.run([], TRAIN, ranks=2, when=busy, then=go_on, env=env)
    assert seen.result.state == "succeeded"
    # The card
    newest = [event for event in seen.of(RankSnapshots) if event.chips][-1]
    status = RunStatus(RunDir(seen.result.dir).read_spec(), "runs/x", clock=lambda: 0.0)
    status.show(newest)
    assert "chip 1: 5.0 of 16.0 GB, 33 % busy" in status.text()
    assert "chip 1: 5.0 of 16.0 GB, 33 % busy" in status.html()
    # What is kept
    known = chips.read_chips(Path(seen.result.dir))
    assert [chip.mean_duty for chip in known] == [31.0, 33.0]
    assert seen.result.summary.chips == "chips: duty cycle 32 %, memory up to 5.0 of 16.0 GB"
