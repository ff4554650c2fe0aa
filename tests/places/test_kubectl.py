"""Pods as kubectl reports them; the real kubectl has the flags of the stand-in."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.cluster import FAKES
from tpunb.places import kubectl
from tpunb.places.config import JobSetSettings

VERBS = ("get", "create", "delete", "exec", "logs", "auth", "version", "config")


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("verb", VERBS)
def test_fake_kubectl_has_only_flags_of_kubectl(verb: str) -> None:
    found = shutil.which("kubectl")
    if found is None or Path(found).resolve().parent == FAKES:
        pytest.skip("there is no kubectl here")
    words = {"auth": ["auth", "can-i"], "config": ["config", "current-context"]}.get(verb, [verb])
    told = "".join(
        subprocess.run([found, *each], capture_output=True, text=True, timeout=120).stdout
        for each in ([*words, "--help"], ["options"])
    )
    known = set(re.findall(r"^\s*(?:-\w, )?(--[\w-]+)=", told, re.MULTILINE))
    parser = runpy.run_path(str(FAKES / "kubectl"))["parser"](verb)
    taken = {flag for flag in parser._option_string_actions if flag.startswith("--")}
    assert taken - {"--help"} <= known


def pod(**status: Any) -> kubectl.Pod:
    labels = {kubectl.INDEX: "3", kubectl.RESTART: "2"}
    return kubectl._pod({"metadata": {"name": "p", "labels": labels}, "status": status})


def test_pod_states_explain_why_a_pod_waits() -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
    seen = pod(phase="Pending", containerStatuses=[{"state": {"waiting": waiting}}])
    assert (seen.index, seen.restart, seen.waits) == (3, 2, "ImagePullBackOff")
    assert seen.told == "ImagePullBackOff: Back-off pulling image"
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes"}
    seen = pod(phase="Pending", conditions=[condition])
    assert (seen.unscheduled, seen.told) == (True, "0/3 nodes")
    ended = {"reason": "OOMKilled", "exitCode": 137}
    seen = pod(
        phase="Failed", reason="Evicted", containerStatuses=[{"state": {"terminated": ended}}]
    )
    assert seen.told == "Evicted; OOMKilled, exit code 137"
    assert pod() == kubectl.Pod("p", 3, 2, "Unknown")


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize(
    "printed",
    [
        *("", "null", "{}", '{"items": 3}', '{"items": [1]}', "garbage"),
        '{"items": [{"kind": "Pod"}]}',
        '{"items": [{"kind": "Pod", "metadata": {"name": "p"}, "status": [1]}]}',
        '{"items": [{"kind": "JobSet"}]}',
        '{"items": [{"kind": "JobSet", "metadata": {}, "status": {"restarts": [1]}}]}',
        '{"items": [{"kind": "JobSet", "metadata": {}, "status": {"conditions": [3]}}]}',
    ],
)
def test_objects_of_another_form_are_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str
) -> None:
    (tmp_path / "kubectl").write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\n")
    (tmp_path / "kubectl").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(kubectl.UnansweredError, match="kubectl get"):
        kubectl.Kubectl(JobSetSettings()).observe("run")
