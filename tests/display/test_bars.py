"""Bars as tqdm and fastprogress really write them."""

from __future__ import annotations

import io

import pytest
from tqdm import tqdm

from tpunb.display.bars import recognise, without_times
from tpunb.events import Bar


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"total": 200}, Bar("", 60, 200)),
        ({"total": 200, "desc": "Epoch 1"}, Bar("Epoch 1", 60, 200)),
        ({"total": 200, "desc": "a: b"}, Bar("a: b", 60, 200)),
        ({"total": 200, "ascii": True}, Bar("", 60, 200)),
        ({"total": 4_000, "unit_scale": True, "unit": "B"}, Bar("", 60, 4_000)),
    ],
)
def test_what_tqdm_writes_is_read_back(options: dict[str, object], expected: Bar) -> None:
    file = io.StringIO()
    bar = tqdm(initial=0, file=file, ncols=80, mininterval=0, **options)  # type: ignore[call-overload]
    bar.update(60)
    bar.close()
    line = file.getvalue().strip("\n").split("\r")[-1]
    assert recognise(line) == expected
    assert without_times(line).endswith(line.partition("[")[0].rstrip().rpartition(" ")[2])
    assert "[" not in without_times(line)


def test_what_fastprogress_writes_is_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    from fastprogress.fastprogress import ConsoleProgressBar

    bar = ConsoleProgressBar(range(8), total=8)
    bar.prefix = "Epoch 1/2 :"
    for count in range(4):
        bar.update(count)
    lines = capsys.readouterr().out.split("\r")
    found = [read for line in lines if (read := recognise(line)) is not None]
    assert found[-1].name == "Epoch 1/2"
    assert found[-1].total == 8
    assert [one.done for one in found] == sorted({one.done for one in found})
    assert "[" not in without_times(lines[-1])


@pytest.mark.parametrize("line", ["", "loss 45% of 12/13", "[1/2] 45%", "60it [00:12, 4.8it/s]"])
def test_other_lines_are_none(line: str) -> None:
    assert recognise(line) is None
    assert without_times(line) == line
