"""`tpunb doctor --on`: facts about hosts."""

from __future__ import annotations

import json
import os

import pytest

from tests.drivers.pods import ReachedPod
from tpunb.machine.machine import detect_machine
from tpunb.places.check import inspect_place


def test_doctor_of_hosts_that_fit_is_ready(pod: ReachedPod) -> None:
    report = inspect_place("pod", pod.project)
    assert report.problems() == []
    lines = str(report).splitlines()
    assert lines[0].startswith("place pod (ssh, ")
    assert [line.split()[:2] for line in lines[3:5]] == [
        [host.name, host.address] for host in pod.pod.hosts
    ]
    cores = 2 * detect_machine(os.environ).default_cores
    assert lines[-1] == f"ready: %%tpu_train --on pod runs on {cores} rehearsal cores on 2 hosts"


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
