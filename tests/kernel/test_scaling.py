"""`tpunb.scaling`: the table of runs that have measured their speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tpunb
from tests.support import Driver
from tpunb.errors import TpunbError
from tpunb.runs.result import RunResult
from tpunb.runs.spec import Price

TRAIN = """
import torch, torch_xla, tpunb
from tpunb.training import Throughput, training_flops
device = torch_xla.device()
model = torch.nn.Linear(16, 4).to(device)
x = torch.ones(8, 16)
speed = Throughput(flops=training_flops(model, x) / len(x))
for step in range(30):
    model(x.to(device)).sum().backward()
    torch_xla.sync()
    speed.add(len(x))
speed.stop()
"""
FLOPS = 2 * 2 * 16 * 4


@pytest.fixture(scope="module")
def runs(driver: Driver) -> dict[int, RunResult]:
    """Runs by number of cores, 1 and 2; run 0 has measured nothing."""
    made = {ranks: driver.run([], TRAIN, ranks=ranks).result for ranks in (1, 2)}
    made[0] = driver.run([], "pass", ranks=1).result
    assert all(result.state == "succeeded" for result in made.values())
    return made


class TestCompare:
    def test_scaling_on_the_cpu_has_no_mfu(self, runs: dict[int, RunResult]) -> None:
        table = tpunb.scaling(runs[1])
        assert "mfu" not in table
        assert table["device"].tolist() == ["CPU"]

    def test_scaling_on_a_tpu_has_mfu_and_cost(
        self, runs: dict[int, RunResult], tmp_path: Path
    ) -> None:
        """Return the folder of a run like one on a TPU."""
        folder = tmp_path / runs[1].dir.name
        folder.mkdir()
        for name in ("spec.json", "env.json", "result.json", "metrics.jsonl"):
            text = (runs[1].dir / name).read_text()
            data = json.loads(text) if name.endswith(".json") else {}
            if name == "spec.json":
                data["device"] = "TPU"
            elif name == "env.json":
                data["TPU_ACCELERATOR_TYPE"] = "v3-8"
            elif name == "result.json":
                price = Price(9.6, "v5litepod-8", "2026-11-21", "a page")
                data["price"] = {**vars(price)}
            (folder / name).write_text(json.dumps(data) if data else text)
        table = tpunb.scaling(runs[1].dir.name, folder=tmp_path)
        speed = table["samples_per_second"].iloc[0]
        # On a v3, a device is half a chip.
        assert table["mfu"].iloc[0] == pytest.approx(speed * FLOPS / (123e12 / 2))
        assert table["dollars"].iloc[0] == pytest.approx(9.6 / 3600 * 1e6 / speed)

    def test_scaling_of_a_run_without_throughput_is_an_error(
        self, runs: dict[int, RunResult]
    ) -> None:
        with pytest.raises(TpunbError, match=r"has not measured its speed: .*Throughput\(\)"):
            tpunb.scaling(runs[1], runs[0])


def test_scaling_without_runs_is_an_error() -> None:
    with pytest.raises(TpunbError, match="needs runs"):
        tpunb.scaling()


def test_scaling_table_has_a_row_per_run_and_reference(runs: dict[int, RunResult]) -> None:
    table = tpunb.scaling(runs[2], runs[1], others={"A100": 1e6}, peak=1e-6)
    assert list(table.index) == [runs[1].dir.name, runs[2].dir.name, "A100"]
    one, two, other = (row for _, row in table.iterrows())
    assert (one["cores"], two["cores"]) == (1, 2)
    assert (one["speedup"], one["efficiency"]) == (1.0, 1.0)
    # Each rank has logged its own speed: their sum is the run's.
    logged = runs[2].metrics()["samples_per_second"]
    assert len(logged) == 2
    assert two["samples_per_second"] == pytest.approx(logged.sum())
    assert two["per_core"] == pytest.approx(logged.mean())
    assert two["speedup"] == pytest.approx(logged.sum() / one["samples_per_second"])
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2)
    assert two["mfu"] == pytest.approx(logged.sum() * FLOPS / (2 * 1e6))
    assert other["speedup"] == pytest.approx(1e6 / one["samples_per_second"])
    assert table["cores"].isna().tolist() == [False, False, True]
    assert "dollars" not in table
