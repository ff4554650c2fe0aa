"""`environment = "make"`: this tpunb and its packages on the hosts, with the real uv."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.drivers.pods import ReachedPod
from tpunb.places import archive, check, environment
from tpunb.places.config import find_place
from tpunb.places.errors import HostsError
from tpunb.places.place import Cancelled
from tpunb.places.transport import make_transport
from tpunb.utils.version import __version__, package_digest


def test_lock_lists_the_installed_packages() -> None:
    lines = environment.write_lock(tpu=False).splitlines()
    assert "torch==2.9.0" in lines  # without the build, which depends on the host
    names = {canonicalize_name(line.partition("==")[0]) for line in lines}
    assert {"ipython", "torch", "torch-xla"} <= names
    assert not {name for name in names if name.startswith("nvidia-")} | {"tpunb"} & names
    assert lines == sorted(lines)


def test_packages_in_editable_mode_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, origin in (
        ("mine", '{"url": "file:///mine", "dir_info": {"editable": true}}'),
        ("built", '{"url": "file:///tmp/built", "dir_info": {}}'),
        ("odd", "[]"),
    ):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "direct_url.json").write_text(origin)
    monkeypatch.syspath_prepend(tmp_path)
    lines = environment.write_lock(tpu=False).splitlines()
    assert {"built==1.0", "odd==1.0"} <= set(lines)
    assert "mine==1.0" not in lines
    assert environment.editable_packages() == ["mine"]


def test_on_a_tpu_the_lock_has_libtpu() -> None:
    lines = environment.write_lock(tpu=True).splitlines()
    [libtpu] = [line for line in lines if line.startswith("libtpu")]
    assert libtpu.startswith("libtpu==")


def test_package_is_complete_and_reproducible() -> None:
    package = archive.own_package()
    assert {"tpunb/cli.py", "tpunb/py.typed"} <= set(package)
    assert not [name for name in package if "__pycache__" in name]
    assert archive.pack(package) == archive.pack(package)


def made(pod: ReachedPod, *, cancelled: bool = False) -> tuple[check.HostsReport, list[str]]:
    place = find_place("pod", pod.project)
    transport = make_transport(place)
    told: list[str] = []
    environment.make_environment(
        transport, check.ask(place, transport), told.append, lambda: cancelled
    )
    return check.ask(place, transport), told


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lock tpunb alone, so that no registry is queried."""
    # The hosts' PATH has the folder of this interpreter.
    if shutil.which("uv", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("there is no uv here")
    monkeypatch.setattr(environment, "write_lock", lambda *, tpu: "")


@pytest.mark.usefixtures("small")
def test_environment_on_a_host_without_uv_explains_the_install(pod: ReachedPod) -> None:
    pod.set_place(environment="make", folder="~/.another")
    pod.change("h1", path="/usr/bin:/bin")
    pod.change("h0", path="/usr/bin:/bin")
    with pytest.raises(HostsError, match="h1: uv is not installed: python3 -m pip install"):
        made(pod)


@pytest.mark.usefixtures("small")
def test_environment_install_can_be_cancelled(pod: ReachedPod) -> None:
    pod.set_place(environment="make", folder="~/.third")
    with pytest.raises(Cancelled):
        made(pod, cancelled=True)


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.usefixtures("small")
def test_environment_with_this_tpunb_is_installed_once_on_hosts(pod: ReachedPod) -> None:
    pod.set_place(environment="make")
    report, told = made(pod)
    assert told == ["installing 0 packages with uv on h0, h1 (once)"]
    for name, host in report.answered:
        assert host.python == f"{pod.folder}/homes/{name}/.tpunb/env/bin/python"
        assert host.versions["tpunb"] == __version__
    python = report.answered[0][1].python
    code = "from tpunb.utils import version; print(version.package_digest(), version.__file__)"
    digest, file = subprocess.run(
        [python, "-I", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert digest == package_digest()
    assert file.startswith(f"{pod.folder}/homes/h0/.tpunb/env/")
    assert made(pod)[1] == []
