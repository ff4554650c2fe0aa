"""Calls of ssh and gcloud, and that the real tools accept them."""

from __future__ import annotations

import fcntl
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import IO

import pytest

from tests.drivers.kernel import until
from tests.drivers.pods import FAKES, ReachedPod
from tpunb.places import transport
from tpunb.places.config import (
    GcloudMigSettings,
    GcloudTpuSettings,
    PlaceConfig,
    SshSettings,
    find_place,
)
from tpunb.places.errors import PlaceError
from tpunb.places.transport import HostProcess, ask_hosts, make_transport

pytestmark = pytest.mark.usefixtures("starts_processes")


def named(settings: SshSettings) -> PlaceConfig:
    return PlaceConfig("pod", "ssh", Path("places.toml"), settings)


def real(tool: str) -> str:
    """The tool itself, not its stand-in."""
    found = shutil.which(tool)
    if found is None or Path(found).resolve().parent == FAKES:
        pytest.skip(f"there is no {tool} here")
    return found


@pytest.mark.usefixtures("starts_processes")
def test_ssh_accepts_the_options_used() -> None:
    ssh = real("ssh")
    command = make_transport(named(SshSettings(hosts=("me@10.0.0.2",)))).command(0, "true")
    assert command[-3:] == ["--", "me@10.0.0.2", "true"]
    told = subprocess.run(
        [ssh, "-G", *command[1:-1]], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {"batchmode yes", "serveraliveinterval 5", "connecttimeout 15"} <= set(told)
    assert "user me" in told


def test_ssh_settings_of_the_user_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config"
    config.write_text("Host slow\n  ServerAliveInterval 60\n  ConnectTimeout 90\n")
    wrapped = tmp_path / "ssh"
    wrapped.write_text(f'#!/bin/sh\nexec {real("ssh")} -F {config} "$@"\n')
    wrapped.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert transport.missing_options("slow") == []
    assert transport.missing_options("other") == [
        *("-o", "ServerAliveInterval=5"),
        *("-o", "ConnectTimeout=15"),
    ]


def test_missing_ssh_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PlaceError, match="install OpenSSH's client"):
        make_transport(named(SshSettings(hosts=("h0",)))).command(0, "true")


@pytest.mark.usefixtures("starts_processes")
def _bytes_in(pipe: IO[bytes]) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_close_does_not_wait_for_a_blocked_sender() -> None:
    process = HostProcess(["sleep", "1000"])
    sender = threading.Thread(target=process.send, args=(bytes(10_000_000),))
    sender.start()
    until(
        lambda: _bytes_in(process.input) == fcntl.fcntl(process.input, fcntl.F_GETPIPE_SZ), "full"
    )
    process.close()
    sender.join()
    assert process.returncode == -signal.SIGKILL


def use_tpu(pod: ReachedPod, state: str = "READY") -> None:
    pod.set_cloud({"tpu": {"mine": {"zone": "z-a", "state": state, "hosts": ["h0", "h1"]}}})
    pod.set_place(kind="gcloud-tpu", name="mine", zone="z-a", project="p", internal_ip=True)


def use_group(pod: ReachedPod, **values: object) -> None:
    pod.set_cloud({"mig": {"group": {"zone": "z-a", "hosts": ["h1", "h0"]}}})
    pod.set_place(kind="gcloud-mig", name="group", zone="z-a", **values)


def asked(pod: ReachedPod) -> list[str]:
    reached = make_transport(find_place("pod", pod.project))
    answers = ask_hosts(reached, dict.fromkeys(range(2), ("hostname; cat", b"-sent")))
    assert [answer.returncode for answer in answers.values()] == [0, 0]
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
    assert make_transport(find_place("pod", pod.project)).hosts == ("mine-w0", "mine-w1")


def test_gcloud_tpu_vm_that_is_not_ready_or_unknown_is_an_error(pod: ReachedPod) -> None:
    use_tpu(pod, "CREATING")
    with pytest.raises(PlaceError, match=r"TPU VM mine is not ready \(state: CREATING\)"):
        make_transport(find_place("pod", pod.project))
    pod.set_place(kind="gcloud-tpu", name="other", zone="z-a")
    with pytest.raises(PlaceError, match="Resource 'other' was not found"):
        make_transport(find_place("pod", pod.project))


def test_gcloud_instance_group_hosts_by_name(pod: ReachedPod) -> None:
    use_group(pod)
    assert make_transport(find_place("pod", pod.project)).hosts == ("h0", "h1")
    assert asked(pod) == ["h0\n-sent", "h1\n-sent"]
    pod.set_cloud({"mig": {"group": {"zone": "z-a", "hosts": ["h0"], "starting": ["h1"]}}})
    with pytest.raises(PlaceError, match="1 of 2 VMs are not running"):
        make_transport(find_place("pod", pod.project))


def test_each_host_has_its_own_exit_code_and_message(pod: ReachedPod) -> None:
    reached = make_transport(find_place("pod", pod.project))
    answers = ask_hosts(reached, {0: ("exit 3", b""), 1: ("echo no >&2; exit 4", b"")})
    assert [answer.returncode for answer in answers.values()] == [3, 4]
    assert [answer.problem for answer in answers.values()] == ["exit code 3", "no"]


def test_timeout_of_a_host_that_does_not_answer(pod: ReachedPod) -> None:
    # A command on the host could begin after ssh was killed, and nothing would end it.
    pod.change("h1", slow=600)
    reached = make_transport(find_place("pod", pod.project))
    [answer] = ask_hosts(reached, {1: ("true", b"")}, timeout=0.5).values()
    assert answer.returncode is None
    assert answer.problem.startswith("no answer in")


GARBAGE = [
    "", "[]", '[{"name": 3}]', r'{"networkEndpoints": [{"ipAddress": 3}]}', "{}",
]  # fmt: skip


@pytest.mark.parametrize("printed", GARBAGE)
def test_whatever_gcloud_prints_is_quoted_in_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str
) -> None:
    tool = tmp_path / "gcloud"
    tool.write_text(f"#!/bin/sh\nprintf '%b' '{printed}'\n")
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for settings in (
        GcloudTpuSettings(name="vm", zone="z"),
        GcloudMigSettings(name="group", zone="z"),
    ):
        with pytest.raises(PlaceError, match=r"cannot be read|is not ready"):
            make_transport(PlaceConfig("pod", "gcloud", Path("places.toml"), settings))


def test_a_tool_that_cannot_be_executed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text("no script")
    (tmp_path / "ssh").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PlaceError, match="`ssh` cannot be executed: Exec format error"):
        make_transport(named(SshSettings(hosts=("h0",)))).command(0, "true")
    with pytest.raises(PlaceError, match="`ssh` cannot be executed"):
        HostProcess(["ssh"])


def test_a_host_that_answers_without_an_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MOST", 1_000_000)
    commands = {0: (["yes", "so it goes"], b""), 1: (["cat"], b"hello")}
    answers = transport.run_commands(("h0", "h1"), commands)
    assert answers[0].problem.startswith("it has printed more than 1 MB, which begin with … ")
    assert (answers[1].output, answers[1].problem) == (b"hello", "")


def test_a_host_that_closes_its_output_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MOST", 1_000_000)

    def problem(command: str, timeout: float) -> str:
        commands = {0: (["sh", "-c", f"exec >&2; {command}"], b"")}
        return transport.run_commands(("h0",), commands, timeout=timeout)[0].problem

    assert problem("exec yes no", 60).startswith("it has printed more than 1 MB")
    assert problem("sleep 0.3; exit 3", 60) == "exit code 3"
    assert re.fullmatch(r"no answer in [1-9]\d* s", problem("exec sleep 600", 1))
