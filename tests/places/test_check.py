"""The check of hosts before each run, with real probes on hosts in namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drivers.pods import ReachedPod, tpu
from tpunb.places import check
from tpunb.places.errors import HostsError
from tpunb.places.hosts_target import HostsTarget, find_hosts
from tpunb.utils.errors import TpunbError


def found(pod: ReachedPod, *, cancelled: bool = False) -> HostsTarget:
    return find_hosts("pod", pod.project, print, lambda: cancelled)


def test_hosts_that_fit_are_known_by_name_address_and_ranks(pod: ReachedPod) -> None:
    pod.set_place(cores=2)
    chosen = found(pod)
    assert chosen.hosts == ("h0", "h1")
    placed = chosen.placed("run")
    assert placed.addresses == tuple(host.address for host in pod.pod.hosts)
    assert placed.folders == tuple(
        f"{pod.folder}/homes/{name}/.tpunb/runs/run" for name in pod.names
    )
    assert [chosen.choose_cores(None), chosen.choose_cores(6)] == [4, 6]
    with pytest.raises(ValueError, match="a multiple of 2"):
        chosen.choose_cores(3)


def shadowed(folder: Path, package: str, version: str) -> str:
    """A folder for PYTHONPATH in which a package has another version."""
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return str(folder)


@pytest.mark.parametrize("package", ["torch", "tpunb"])
def test_another_version_on_one_host_is_refused_by_its_name(
    pod: ReachedPod, tmp_path: Path, package: str
) -> None:
    pod.change("h1", env={"PYTHONPATH": shadowed(tmp_path, package, "1.2.3")})
    with pytest.raises(HostsError) as caught:
        found(pod)
    assert {host for host, _ in caught.value.problems} == {"h1"}
    assert f"{package} 1.2.3" in str(caught.value)


def test_other_files_of_the_same_version_are_refused(
    pod: ReachedPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "package_digest", lambda: "another")
    with pytest.raises(HostsError, match=r"\nh0, h1: the files of its tpunb [\d.]+ differ"):
        found(pod)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"python": "/usr/bin/python3"}, "h0, h1: tpunb is not installed for /usr/bin/python3"),
        ({"python": "~/venv/bin/python"}, "venv/bin/python"),
        ({"hosts": ["h0", "nowhere"]}, "nowhere: ssh: Could not resolve hostname nowhere"),
    ],
)
def test_hosts_that_cannot_run_tpunb_are_named(
    pod: ReachedPod, settings: dict[str, object], said: str
) -> None:
    pod.set_place(**settings)
    with pytest.raises(HostsError, match=said):
        found(pod)


def test_node_ranks_are_worker_numbers(pod: ReachedPod, tmp_path: Path) -> None:
    pod.change("h0", env=tpu(tmp_path / "0", 1))
    pod.change("h1", env=tpu(tmp_path / "1", 0))
    chosen = found(pod)
    assert chosen.hosts == chosen.transport.hosts == ("h1", "h0")
    assert chosen.choose_cores("all") == 8
    assert chosen.placed("run").addresses == ("10.77.0.3", "10.77.0.2")
    with pytest.raises(ValueError, match="together or not at all"):
        chosen.choose_cores(4)


@pytest.mark.parametrize(
    ("hosts", "workers", "chips", "said"),
    [
        (["h0", "h1"], (0, 1), (4, 2), r"it has \d chips, unlike the other hosts"),
        (["h1"], (1, 0), (4, 4), "worker 0 of the 2 hosts of a v5litepod-8: the place must"),
        (["h0", "h1"], (0, 0), (4, 4), "h0, h1: it is worker 0 of the 2 hosts"),
    ],
)
def test_hosts_that_are_not_one_whole_slice_are_refused(
    pod: ReachedPod,
    tmp_path: Path,
    hosts: list[str],
    workers: tuple[int, int],
    chips: tuple[int, int],
    said: str,
) -> None:
    pod.set_place(hosts=hosts)
    for number in (0, 1):
        env = tpu(tmp_path / str(number), workers[number], chips=chips[number])
        pod.change(f"h{number}", env=env)
    with pytest.raises(HostsError, match=said):
        found(pod)


def test_port_in_use_is_refused_if_the_next_ones_are_too(
    pod: ReachedPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import socket, sys; s = socket.create_server((sys.argv[1], 8461)); print(flush=True); "
    with pod[0].popen(
        ["python3", "-c", code + "sys.stdin.read()", pod[0].address], stdin=-1, stdout=-1
    ) as listener:
        assert listener.stdout is not None
        listener.stdout.readline()
        assert found(pod).placed("run").port == 8460
        monkeypatch.setattr(check, "store_ports", lambda port: range(port + 1, port + 2))
        with pytest.raises(HostsError, match="\nh0: port 8460 and the next ones are in use"):
            found(pod)
        listener.communicate(b"")


def test_interrupt_during_the_host_check(pod: ReachedPod) -> None:
    with pytest.raises(TpunbError, match="interrupted before the run began"):
        found(pod, cancelled=True)
