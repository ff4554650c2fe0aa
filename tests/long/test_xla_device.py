"""Compiled programs are kept on disk, by rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# One process imports torch_xla, and each case is a fork of it, as ranks are.
CODE = """\
import os, sys
import torch, torch_xla
from tpunb.xla import device

def case(cache, own=""):
    if os.fork():
        os.wait()
        return
    os.environ["TPUNB_XLA_CACHE"] = cache
    if own:
        import torch_xla.runtime as xr
        xr.initialize_cache(own)
    device.keep_compiled(3, 8)
    x = torch.ones(3, device="xla")
    torch_xla.sync()
    print((x + 1).cpu().tolist(), os.environ.get("XLA_PERSISTENT_CACHE_PATH"), flush=True)
    os._exit(0)

place = sys.argv[1]
case(place + "/cache")
case(place + "/unused", own=place + "/own")
case("off")
case(place + "/file")
print(torch_xla.__version__)
"""


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
