"""`tpunb doctor --on`: what is told of hosts, and between them."""

from __future__ import annotations

import pytest

from tests.drivers.pods import ReachedPod
from tpunb.places.doctor import inspect_place


def test_hosts_that_reach_each_other_are_ready(pod: ReachedPod) -> None:
    report = inspect_place("pod", pod.project)
    assert report.problems() == []
    lines = report.text().splitlines()
    assert lines[0].startswith("place pod (ssh, ")
    assert [line.split()[:2] for line in lines[2:4]] == [
        [host.name, host.address] for host in pod.pod.hosts
    ]
    assert lines[-1] == "ready: %%tpu_train --on pod runs on 8 cores"


def test_ports_that_are_not_let_through_are_named_in_both_directions(pod: ReachedPod) -> None:
    pod[1].cut()
    try:
        report = inspect_place("pod", pod.project)
    finally:
        pod[1].mend()
    problems = dict(report.problems())
    assert "h1 is not reached at port 8470, 8476" in problems["h0"]
    assert "h0 is not reached at port 8470, 8476" in problems["h1"]
    assert "problem: h0: h1 is not reached" in report.text()
    assert report.to_json()["problems"][0]["host"] == "h0"


def test_what_forbids_a_run_is_told_and_the_rest_still_shown(pod: ReachedPod) -> None:
    pod.change("h0", refuses="Connection refused")
    report = inspect_place("pod", pod.project)
    text = report.text()
    assert "problem: h0: Connection refused" in text
    assert "h1  " in text
    assert "ready" not in text


@pytest.mark.parametrize("hosts", [["h0"], ["h1"]])
def test_a_single_host_has_nobody_to_reach(pod: ReachedPod, hosts: list[str]) -> None:
    pod.set_place(hosts=hosts)
    report = inspect_place("pod", pod.project)
    assert report.problems() == []
    assert report.hosts.names == tuple(hosts)
