"""`tpunb doctor --on`: facts about hosts, and whether they reach each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.drivers.pods import ReachedPod, tpu
from tpunb.places.check import HostsReport
from tpunb.places.config import PlaceConfig, SshSettings
from tpunb.places.inspect_place import make_report
from tpunb.places.kinds import inspect_place


def test_doctor_of_connected_hosts_is_ready(pod: ReachedPod) -> None:
    report = inspect_place("pod", pod.project)
    assert report.problems() == []
    lines = report.text().splitlines()
    assert lines[0].startswith("place pod (ssh, ")
    assert [line.split()[:2] for line in lines[3:5]] == [
        [host.name, host.address] for host in pod.pod.hosts
    ]
    assert lines[-1] == "ready: %%tpu_train --on pod runs on 8 rehearsal cores on 2 hosts"


def test_doctor_names_blocked_ports_in_both_directions(pod: ReachedPod) -> None:
    problems = problems_when_cut(pod)
    any_port = r"\d{5}: allow this traffic between the hosts"
    assert re.match(rf"it cannot reach h1 at port {any_port}", problems["h0"])
    assert re.match(rf"it cannot reach h0 at port 8460, 8461, {any_port}", problems["h1"])


def test_doctor_checks_the_ports_of_a_tpu(pod: ReachedPod, tmp_path: Path) -> None:
    for number in (0, 1):
        pod.change(f"h{number}", env=tpu(tmp_path / str(number), number))
    problems = problems_when_cut(pod)
    libtpu = "8471, 8476, 8477, 8478, 8479:"
    assert problems["h0"].startswith(f"it cannot reach h1 at port {libtpu}")
    assert problems["h1"].startswith(f"it cannot reach h0 at port 8460, 8461, {libtpu}")


def problems_when_cut(pod: ReachedPod) -> dict[str, str]:
    pod[1].cut()
    try:
        report = inspect_place("pod", pod.project)
    finally:
        pod[1].mend()
    assert "problem: h0: it cannot reach h1" in report.text()
    problems = {each["host"]: each["message"] for each in report.to_json()["problems"]}
    assert problems == dict(report.problems())
    return problems


def test_doctor_shows_an_unreachable_host_and_the_others(pod: ReachedPod) -> None:
    pod.change("h0", refuses="Connection refused")
    report = inspect_place("pod", pod.project)
    text = report.text()
    assert "problem: h0: Connection refused" in text
    assert "h1  " in text
    assert "ready" not in text


@pytest.mark.parametrize("hosts", [["h0"], ["h1"]])
def test_doctor_of_a_single_host_needs_no_connection(pod: ReachedPod, hosts: list[str]) -> None:
    pod.set_place(hosts=hosts)
    report = inspect_place("pod", pod.project)
    assert report.problems() == []
    assert [host["name"] for host in report.to_json()["hosts"]] == hosts


def test_doctor_names_hosts_if_none_answers() -> None:
    place = PlaceConfig("pod", "ssh", Path("places.toml"), SshSettings(hosts=("h0", "h1")))
    silent = dict.fromkeys(("h0", "h1"), "Permission denied (publickey).")
    report = make_report(HostsReport(place, ("h0", "h1"), (None, None), silent))
    assert report.problems() == list(silent.items())
    assert "problem: h0, h1: Permission denied (publickey)." in report.text()
