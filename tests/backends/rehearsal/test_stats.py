"""Counts, bytes and times of collectives, and their place in the result of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import Driver
from tpunb.backends.rehearsal import stats
from tpunb.backends.rehearsal.stats import CollectiveStats
from tpunb.display.status import RunStatus
from tpunb.runs.directory import RunDir
from tpunb.runs.result import Collective, RunResult, count_collectives, describe_collectives


def test_collective_calls_bytes_and_times_add_up() -> None:
    counted = CollectiveStats()
    counted.add("rendezvous", 0, 0.5, 0.25)
    for _ in range(3):
        counted.add("all_reduce sum", 400, 0.25, 0.5)
    assert counted.collectives(2) == [
        Collective(2, "all_reduce sum", 3, 1200, 0.75, 1.5),
        Collective(2, "rendezvous", 1, 0, 0.5, 0.25),
    ]


@pytest.mark.parametrize(
    ("described", "size"),
    [
        ("float32[3, 4]", 48),
        ("bfloat16[2]", 4),
        ("float16[2]", 4),
        ("int64[]", 8),
        ("uint8[5]", 5),
        ("bool[2, 2]", 4),
        ("float32[0, 4]", 0),
        ("float8_e4m3fn[7]", 7),
        ("complex64[2]", 16),
        ("float32[3] on cpu", 12),
    ],
)
def test_collective_bytes_of_a_tensor(described: str, size: int) -> None:
    assert stats.size_of((described,)) == size
    assert stats.size_of((described, described)) == 2 * size


def test_collective_stats_in_words() -> None:
    rows = [
        Collective(0, "all_reduce sum", 1200, 4_710_000_000, 0.1, 3.2),
        Collective(0, "rendezvous", 1, 0, 0.0, 0.0),
        Collective(1, "all_reduce sum", 1200, 4_710_000_000, 1.1, 2.9),
    ]
    assert count_collectives(rows) == "1,201 collectives, 4.7 GB"
    assert count_collectives([Collective(0, "rendezvous", 1, 12, 0.0, 0.0)]) == "1 collective, 12 B"
    assert describe_collectives(rows) == (
        "each rank: 1,201 collectives, 4.7 GB (1,200 all_reduce sum, 1 rendezvous), 3.2 s; waited "
        "up to 1.1 s for other ranks. CPU simulation: the same collectives and bytes as on a TPU, "
        "not the same timings"
    )


@pytest.mark.parametrize(
    "text",
    [
        '[{"rank": 0, "oper',  # a full disk has cut it off
        '[{"rank": 0, "operation": "rendezvous"}]',
        '[["rank", 0]]',
        '{"rank": 0}',
        "3",
        "[" * 100_000,
        "\udcff",
    ],
)
def test_collective_stats_of_a_damaged_file_are_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "collectives.json"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert stats.read_collectives(path) == []


def test_collective_stats_without_calls_leave_no_file(tmp_path: Path) -> None:
    stats.save_collectives(tmp_path / "collectives.json", 0)
    assert list(tmp_path.iterdir()) == []
    assert stats.read_collectives(tmp_path / "collectives.json") == []


TRAIN = """\
import os, time, torch, torch_xla
import torch_xla.core.xla_model as xm
rank, device = int(os.environ["RANK"]), torch_xla.device()
for step in range(4):
    if rank == 0 and step == 2:
        time.sleep(2)  # far longer than the ranks' starts differ
    xm.all_reduce("sum", [torch.ones(50, device=device), torch.ones(50, device=device)])
    torch_xla.sync()
xm.all_gather(torch.ones(10, dtype=torch.bfloat16, device=device), pin_layout=False)
xm.rendezvous("end", b"four")
"""


def test_collective_stats_in_result_log_and_card(driver: Driver) -> None:
    result = driver.run([], TRAIN, ranks=2).result
    assert result.state == "succeeded"
    counted = {(row.rank, row.operation): row for row in result.collectives}
    for rank in (0, 1):
        assert counted[rank, "all_reduce sum"].calls == 4
        assert counted[rank, "all_reduce sum"].bytes == 4 * 100 * 4
        assert counted[rank, "rendezvous"].bytes == 4
        assert counted[rank, "all_gather"].bytes == 20
        assert all(row.took > 0 for row in result.collectives)
    assert len(counted) == 6
    # Rank 1 waited while rank 0 slept.
    assert counted[1, "all_reduce sum"].waited > 0.2
    assert counted[1, "all_reduce sum"].waited > counted[0, "all_reduce sum"].waited
    kept = json.loads((result.dir / "result.json").read_text())
    first = kept["collectives"][0]
    assert (first["rank"], first["operation"], first["calls"]) == (0, "all_reduce sum", 4)
    assert RunResult.from_json(kept, result.dir).collectives == result.collectives
    assert "each rank: 6 collectives, 1.6 kB (4 all_reduce sum, " in str(result)
    assert "rehearsal on CPU" in str(result)
    log = (result.dir / "run.log").read_text().splitlines()
    assert log[0] == "[tpunb] rehearsal on CPU: this run uses no TPU"
    status = RunStatus(RunDir(result.dir).read_spec(), "runs/x", clock=lambda: 0.0)
    status.end(result)
    assert "rehearsal on CPU" in status.text()
    assert "6 collectives, 1.6 kB" in status.html()
