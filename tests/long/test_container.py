"""More of tests/test_container.py, which takes longer."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_container import ROOT, instructions


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.timeout(900)  # it may download libtpu
def test_its_steps_make_an_environment_for_runs(tmp_path: Path) -> None:
    """COPY and RUN without a daemon: into a folder, and with an interpreter of its own.

    Left out: the index of torch's own builds for the CPU, and that nothing is cached.
    """
    for line in instructions("COPY"):
        *sources, target = line.split()
        there = tmp_path / target.strip("/")
        there.mkdir(parents=True, exist_ok=True)
        for source in sources:
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, there, dirs_exist_ok=True, ignore=ignored)
            else:
                shutil.copy(ROOT / source, there)
    uv = str(Path(sys.executable).with_name("uv"))
    subprocess.run(
        [uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "env"], check=True
    )
    python = tmp_path / "env/bin/python"
    left = {"--system", "--no-cache", "--no-cache-dir", "--torch-backend=cpu"}
    [run] = instructions("RUN")
    for command in run.split("&&"):
        *_, install = command.partition("pip install ")
        words = [word for word in shlex.split(install) if word not in left]
        words = [word.replace("/usr/src", f"{tmp_path}/usr/src") for word in words]
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *words], check=True)
    subprocess.run([uv, "pip", "check", "--quiet", "--python", python], check=True)
    [work] = instructions("WORKDIR")
    (tmp_path / work.strip("/")).mkdir()
    done = subprocess.run(
        [tmp_path / "env/bin" / "tpunb", *json.loads(instructions("CMD")[0])[1:], "--json"],
        cwd=tmp_path / work.strip("/"),
        env={"PATH": "/usr/bin:/bin", "GCE_METADATA_HOST": "127.0.0.1:1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    versions = json.loads(done.stdout)["versions"]
    assert (versions["torch"].partition("+")[0], versions["torch_xla"]) == ("2.9.0", "2.9.0")
    assert (tmp_path / "env/bin/torchrun").exists()
    ask = "import gcsfs, importlib.metadata as m; print(m.version('libtpu'))"
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip()
