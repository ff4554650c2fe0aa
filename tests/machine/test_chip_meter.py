"""Usage of chips, from libtpu's metrics servers to the run folder."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fakes.libtpu import FakeChip, ports_of, serving
from tpunb.machine import chip_meter
from tpunb.machine.chip_meter import ChipMeter
from tpunb.runs import chips
from tpunb.runs.chips import Chip

GB = 10**9


def test_chips_of_several_processes_are_counted_in_the_order_of_their_ports() -> None:
    first, second = FakeChip(3 * GB, 80.0), FakeChip(1 * GB, 10.0)
    with serving([first], [second]) as servers:
        ports = chip_meter.parse_ports(ports_of(servers))
        meter = ChipMeter([*ports, 1], chip_meter.ask_libtpu)  # no server at the last port
        before = meter.look(training=False)
        assert before == [
            Chip(0, 3 * GB, 16 * GB, 80.0, 3 * GB),
            Chip(1, 1 * GB, 16 * GB, 10.0, 1 * GB),
        ]
        meter.look(training=True)
        first.memory, first.duty = 2 * GB, 40.0
        now = meter.look(training=True)
        assert (now[0].memory, now[0].peak, now[0].mean_duty) == (2 * GB, 3 * GB, 60.0)
        servers[1].chips.clear()
        assert meter.look(training=True)[1].peak == GB
    # The processes have ended: their peaks and means are kept.
    after = meter.look(training=True)
    assert [(chip.memory, chip.duty, chip.mean_duty) for chip in after] == [
        (0, 0.0, 160 / 3),
        (0, 0.0, 10.0),
    ]


def test_a_server_that_hangs_holds_nothing_up_and_is_not_asked_again() -> None:
    with serving([FakeChip(3 * GB, 80.0)], [FakeChip(1 * GB, 10.0)]) as servers:
        ports = chip_meter.parse_ports(ports_of(servers))
        known = ChipMeter(ports, chip_meter.ask_libtpu).look(training=True)
        assert [chip.memory for chip in known] == [3 * GB, GB]
        meter = ChipMeter(ports, chip_meter.ask_libtpu, within=300.0)
        meter.look(training=True)
        servers[0].answers.clear()
        meter._within = 0.0
        asked = len(servers[0].asked)
        while len(servers[0].asked) == asked:  # the query has arrived
            meter.look(training=True)
        for _ in range(3):
            now = meter.look(training=True)
        assert (now[0].memory, now[0].duty, now[0].peak) == (0, 0.0, 3 * GB)
        assert len(servers[0].asked) == asked + 1
        meter._within = 300.0
        servers[0].answers.set()
        meter.look(training=True)
        assert meter.look(training=True)[0].memory == 3 * GB


def test_without_a_server_nothing_is_known_and_nothing_written(tmp_path: Path) -> None:
    meter = ChipMeter([1], chip_meter.ask_libtpu)  # no server listens on port 1
    assert meter.look(training=True) == []
    assert chip_meter.parse_ports("") == [8431]
    assert chips.read_chips(tmp_path) == ()


def test_gpus_are_those_that_cuda_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    loads = {0: (3 * GB, 40), 1: (5 * GB, 90), "GPU-8932": (1 * GB, 10)}

    def find(which: int | str) -> tuple[int, int]:
        if which not in loads:
            raise NVMLError("Not Found")
        return loads[which]

    library = SimpleNamespace(  # nvidia-ml-py 13, whose driver no test machine has
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=find,
        nvmlDeviceGetHandleByUUID=find,
        nvmlDeviceGetMemoryInfo=lambda found: SimpleNamespace(used=found[0], total=16 * GB),
        nvmlDeviceGetUtilizationRates=lambda found: SimpleNamespace(gpu=found[1]),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    every = chip_meter.meter_of_gpus(None).look(training=True)
    assert list(map(str, every)) == [
        "GPU 0: 3.0 of 16.0 GB, 40 % busy",
        "GPU 1: 5.0 of 16.0 GB, 90 % busy",
    ]
    told = "GPUs: duty cycle 65 % (40 % on GPU 0), memory up to 5.0 of 16.0 GB"
    assert chips.describe_chips(every) == told
    assert [gpu.duty for gpu in chip_meter.meter_of_gpus("1, GPU-8932").look(training=True)] == [
        90.0,
        10.0,
    ]
    assert chip_meter.meter_of_gpus("0,7").look(training=True) == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert chip_meter.meter_of_gpus(None).look(training=True) == []
