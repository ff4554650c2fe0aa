"""Calls of ssh and gcloud, and that the real tools accept them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.drivers.pods import FAKES, ReachedPod
from tpunb.places.config import GcloudSettings, PlaceConfig, find_place
from tpunb.places.errors import PlaceError
from tpunb.places.transport import (
    SshTransport,
    Transport,
    ask_hosts,
    make_transport,
)

pytestmark = pytest.mark.usefixtures("starts_processes")


def test_ssh_accepts_the_options_used() -> None:
    ssh = shutil.which("ssh")
    if ssh is None or Path(ssh).resolve().parent == FAKES:
        pytest.skip("there is no ssh here")
    command = SshTransport(["me@10.0.0.2"]).command(0, "true")
    assert command[-3:] == ["--", "me@10.0.0.2", "true"]
    told = subprocess.run(
        [ssh, "-G", *command[1:-1]], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {"batchmode yes", "serveraliveinterval 5", "connecttimeout 30"} <= set(told)
    assert "user me" in told


def reached(pod: ReachedPod) -> Transport:
    return make_transport(find_place("pod", pod.project))


def use_tpu(pod: ReachedPod, state: str = "READY") -> None:
    pod.set_cloud({"tpu": {"mine": {"zone": "z-a", "state": state, "hosts": ["h0", "h1"]}}})
    pod.set_place(kind="gcloud-tpu", name="mine", zone="z-a", project="p", internal_ip=True)


def asked(pod: ReachedPod) -> list[str]:
    answers = ask_hosts(reached(pod), dict.fromkeys(range(2), ("hostname; cat", b"-sent")))
    assert [answer.problem for answer in answers.values()] == ["", ""]
    return [answer.output.decode() for answer in answers.values()]


def test_gcloud_tpu_worker_numbers_are_host_numbers(pod: ReachedPod) -> None:
    pod.log.unlink(missing_ok=True)
    use_tpu(pod)
    assert asked(pod) == ["h0\n-sent", "h1\n-sent"]
    [describe, *logins] = pod.calls()
    assert describe[1:] == [
        *("compute", "tpus", "tpu-vm", "describe", "mine"),
        *("--zone=z-a", "--project=p", "--format=json"),
    ]
    assert sorted(word for call in logins for word in call if "--worker" in word) == [
        "--worker=0",
        "--worker=1",
    ]
    assert all({"--internal-ip", "--quiet", "--command=hostname; cat"} <= {*c} for c in logins)
    transport = reached(pod)
    transport.reorder([1, 0])
    assert transport.hosts == ("mine-w1", "mine-w0")
    assert "--worker=1" in transport.command(0, "true")


def test_gcloud_tpu_vm_that_is_not_ready_or_unknown_is_an_error(pod: ReachedPod) -> None:
    use_tpu(pod, "CREATING")
    with pytest.raises(PlaceError, match=r"mine is not ready: 2 hosts, state CREATING"):
        reached(pod)
    pod.set_place(kind="gcloud-tpu", name="other", zone="z-a")
    with pytest.raises(PlaceError, match="Resource 'other' was not found"):
        reached(pod)


def test_gcloud_instance_group_hosts_by_name(pod: ReachedPod) -> None:
    pod.set_cloud({"mig": {"group": {"zone": "z-a", "hosts": ["h1", "h0"]}}})
    pod.set_place(kind="gcloud-mig", name="group", zone="z-a", tunnel=True)
    assert reached(pod).hosts == ("h0", "h1")
    assert asked(pod) == ["h0\n-sent", "h1\n-sent"]
    pod.set_cloud({"mig": {"group": {"zone": "z-a", "hosts": ["h0"], "starting": ["h1"]}}})
    with pytest.raises(PlaceError, match="group is not ready: 2 hosts, state RUNNING, STAGING"):
        reached(pod)


@pytest.mark.parametrize("kind", ["gcloud-tpu", "gcloud-mig"])
@pytest.mark.parametrize("printed", ["", "[]", '[{"instance": 3}]', '{"networkEndpoints": 3}'])
def test_whatever_gcloud_prints_becomes_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, kind: str
) -> None:
    tool = tmp_path / "gcloud"
    tool.write_text(f"#!/bin/sh\nprintf '%b' '{printed}'\n")
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    place = PlaceConfig("pod", kind, Path("places.toml"), GcloudSettings(name="vm", zone="z"))
    with pytest.raises(PlaceError, match=r"cannot be read|is not ready"):
        make_transport(place)


def test_each_host_has_its_own_exit_code_message_and_timeout(pod: ReachedPod) -> None:
    answers = ask_hosts(reached(pod), {0: ("exit 3", b""), 1: ("echo no >&2; exit 4", b"")})
    assert [answer.problem for answer in answers.values()] == ["exit code 3", "no"]
    # A command on the host could begin after ssh was killed, and nothing would end it.
    pod.change("h1", slow=600)
    [answer] = ask_hosts(reached(pod), {1: ("true", b"")}, timeout=0.5).values()
    assert answer.problem == "`ssh` has not answered in 0.5 s"


def test_a_tool_that_is_missing_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PlaceError, match="install OpenSSH's client"):
        ask_hosts(SshTransport(["h0", "h1"]), dict.fromkeys(range(2), ("true", b"")))
