"""`tpunb doctor --on`: facts about hosts, and whether they reach each other."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.drivers.pods import ReachedPod, tpu
from tpunb.machine.machine import detect_machine
from tpunb.places import check
from tpunb.places.check import inspect_place


def test_doctor_of_connected_hosts_is_ready(pod: ReachedPod) -> None:
    report = inspect_place("pod", pod.project)
    assert report.problems() == []
    lines = str(report).splitlines()
    assert lines[0].startswith("place pod (ssh, ")
    assert [line.split()[:2] for line in lines[3:5]] == [
        [host.name, host.address] for host in pod.pod.hosts
    ]
    cores = 2 * detect_machine(os.environ).default_cores
    assert lines[-1] == f"ready: %%tpu_train --on pod runs on {cores} rehearsal cores on 2 hosts"


@pytest.mark.parametrize("device", ["CPU", "TPU"])
def test_doctor_names_blocked_ports_in_both_directions(
    pod: ReachedPod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(check, "PATIENCE", 2.0)
    ports = "50000"
    if device == "TPU":
        ports = "8471, 8476, 8477, 8478, 8479"
        for number in (0, 1):
            pod.change(f"h{number}", env=tpu(tmp_path / str(number), number))
    pod[1].cut()
    try:
        report = inspect_place("pod", pod.project)
    finally:
        pod[1].mend()
    problems = dict(report.problems())
    assert re.match(f"it cannot reach h1 at port {ports}: allow", problems["h0"])
    assert re.match(rf"it cannot reach h0 at port 846[\d, 6]+, {ports}: allow", problems["h1"])


@pytest.mark.parametrize("refused", [["h0"], ["h0", "h1"]])
def test_doctor_shows_unreachable_hosts_and_the_others(pod: ReachedPod, refused: list[str]) -> None:
    for name in refused:
        pod.change(name, refuses="Connection refused")
    report = inspect_place("pod", pod.project)
    text = str(report)
    assert f"problem: {', '.join(refused)}: Connection refused" in text
    assert ("h1  " in text) is (len(refused) == 1)
    assert "ready" not in text
    told = json.loads(json.dumps(report.to_json()))
    assert [host["name"] for host in told["hosts"]] == [n for n in pod.names if n not in refused]
    assert [each["host"] for each in told["problems"]] == refused


def test_doctor_of_a_single_host_needs_no_connection(pod: ReachedPod) -> None:
    pod.set_place(hosts=["h1"])
    assert inspect_place("pod", pod.project).problems() == []
