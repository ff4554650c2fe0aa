"""More of tests/xla/test_device.py, which takes longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.xla.test_device import CODE


@pytest.mark.usefixtures("starts_processes")
def test_what_is_compiled_is_kept_where_the_environment_says(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    env = {**os.environ, "PJRT_DEVICE": "CPU"}
    for name in ("TPUNB_XLA_CACHE", "XLA_PERSISTENT_CACHE_PATH"):
        env.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", CODE, tmp_path], env=env, capture_output=True, text=True, check=True
    )
    kept, own, off, impossible, version = done.stdout.splitlines()
    place = tmp_path / "cache" / version / "3-of-8"
    assert kept == f"[2.0, 2.0, 2.0] {place}"
    assert list(place.iterdir())  # torch_xla has written there
    assert own == f"[2.0, 2.0, 2.0] {tmp_path / 'own'}"
    assert not (tmp_path / "unused").exists()
    assert off == impossible == "[2.0, 2.0, 2.0] None"
    assert f"tpunb: compiled programs are not kept: {tmp_path / 'file'}/" in done.stderr
