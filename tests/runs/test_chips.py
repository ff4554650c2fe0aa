from __future__ import annotations

from pathlib import Path

from tpunb.display.html import MAX_CHIPS, chips_html, describe_some_chips
from tpunb.runs import chips
from tpunb.runs.chips import Chip
from tpunb.runs.directory import RunDir
from tpunb.runs.folder_stream import FolderStream, UnionFolder

GB = 10**9


def test_chips_of_all_hosts_are_collected(tmp_path: Path) -> None:
    run, hosts = RunDir(tmp_path / "whole"), ("a", "b", "c")
    run.path.mkdir()
    for node_rank in (0, 1):  # c has no library that asks
        here = tmp_path / str(node_rank)
        here.mkdir()
        chips.write_chips(here, [Chip(0, node_rank * GB, 16 * GB, 50.0)])
        union = UnionFolder(run, node_rank, range(node_rank, node_rank + 1), hosts[node_rank])
        for sent in FolderStream(RunDir(here)).read(last=True):
            union.add(sent)
    whole = run.path
    found = chips.read_chips(whole, hosts)
    assert [(chip.name, chip.memory) for chip in found] == [("a/0", 0), ("b/0", GB)]
    (whole / chips.FILE).write_text('[{"number": 0')  # cut off
    assert [chip.name for chip in chips.read_chips(whole, hosts)] == ["b/0"]


def test_chips_in_large_number_are_one_line_naming_the_idle_one() -> None:
    busy = [Chip(n, 12 * GB, 16 * GB, 90.0, host="a") for n in range(MAX_CHIPS)]
    every = [*busy, Chip(0, GB, 16 * GB, 4.0, host="b")]
    assert describe_some_chips(every) == [
        "17 chips: duty cycle 85 % (4 % on chip b/0), memory up to 12.0 of 16.0 GB"
    ]
    assert chips_html(every).count("<div") == 1
    assert chips.describe_chips([]) == ""
