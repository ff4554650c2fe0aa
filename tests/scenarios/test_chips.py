"""What the chips of a run do: on its card, in `tpunb top`, in its summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.libtpu import FakeChip, ports_of, serving
from tests.support import Driver
from tpunb import cli
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


def test_chip_usage_in_top_and_in_the_run_summary(
    driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[dict[str, Any]] = []

    def busy(event: Event) -> bool:
        return isinstance(event, RankSnapshots) and any(
            chip.mean_duty is not None for chip in event.chips
        )

    def look(run: Any) -> None:
        capsys.readouterr()
        assert cli.main(["top", "--runs", str(driver.folder), "--json"]) == 0
        told.extend(json.loads(capsys.readouterr().out))
        assert cli.main(["top", "--runs", str(driver.folder)]) == 0
        (run.dir.path / "go").touch()

    with serving([FakeChip(3 * GB, 31.0), FakeChip(5 * GB, 33.0)]) as servers:
        env = {PORTS: ports_of(servers)}
        seen = driver.run([], TRAIN, ranks=2, when=busy, then=look, env=env)
    assert seen.result.state == "succeeded"
    # The card
    newest = [event for event in seen.of(RankSnapshots) if event.chips][-1]
    status = RunStatus(RunDir(seen.result.dir).read_spec(), "runs/x", clock=lambda: 0.0)
    status.show(newest)
    assert "chip 1: 5.0 of 16.0 GB, 33 % busy" in status.text()
    assert "chip 1: 5.0 of 16.0 GB, 33 % busy" in status.html()
    # The terminal
    [run] = told
    assert run["run"] == seen.result.dir.name
    assert [chip["memory"] for chip in run["chips"]] == [3 * GB, 5 * GB]
    assert run["steps_per_second"] > 0
    assert 0.5 < run["waiting_for_data"] <= 1.0
    assert all(rank["memory"] > 10**6 and rank["steps"] for rank in run["ranks"])
    text = capsys.readouterr().out
    assert "2 ranks" in text
    assert "chip 0: 3.0 of 16.0 GB, 31 % busy" in text
    # What is kept
    known = chips.read_chips(Path(seen.result.dir))
    assert [chip.mean_duty for chip in known] == [31.0, 33.0]
    assert seen.result.summary.chips == "chips: duty cycle 32 %, memory up to 5.0 of 16.0 GB"
    assert cli.main(["top", "--runs", str(driver.folder)]) == 0
    assert capsys.readouterr().out == f"No active runs in {driver.folder}.\n"
