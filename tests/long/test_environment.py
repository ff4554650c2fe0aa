"""More of tests/places/test_environment.py, which takes longer."""

from __future__ import annotations

import subprocess

import pytest

from tests.drivers.pods import ReachedPod
from tests.places.conftest import _pod, pod
from tests.places.test_environment import made, small
from tpunb.utils.version import __version__, package_digest


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
