"""More of tests/places/test_transport.py, which takes longer."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from tests.drivers.pods import ReachedPod
from tests.places.conftest import _pod, pod
from tests.places.test_transport import COMMANDS, WIDE, calls_of_gcloud

pytestmark = pytest.mark.usefixtures("starts_processes")


@pytest.mark.parametrize("name", COMMANDS)
def test_gcloud_flags_used_are_documented(pod: ReachedPod, name: str) -> None:
    used = {word.partition("=")[0] for call in calls_of_gcloud(pod, name) for word in call}
    flags = {word for word in used if word.startswith("--")} - WIDE
    assert flags
    path = shutil.which("gcloud", path="/usr/bin:/usr/local/bin:/snap/bin")
    if path is None:
        pytest.skip("there is no gcloud here")
    text = subprocess.run(
        [path, *COMMANDS[name], "--help"], capture_output=True, text=True, timeout=120
    ).stdout
    documented = set(re.findall(r"--[a-z][a-z-]+", re.sub(r"\x1b\[[0-9;]*m", "", text)))
    assert flags <= documented
