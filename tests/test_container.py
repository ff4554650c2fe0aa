"""`docker/Dockerfile`: linted, and made of what there is."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "docker" / "Dockerfile"


def instructions(name: str) -> list[str]:
    """What follows a word of the Dockerfile, continued lines joined."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    lines = (line.partition(" ") for line in text.splitlines())
    return [rest.strip() for word, _, rest in lines if word == name]


@pytest.mark.usefixtures("starts_processes")
def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_everything_that_it_copies_is_there_and_not_ignored() -> None:
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().split()
    copied = [name for line in instructions("COPY") for name in line.split()[:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored


def test_it_installs_the_pair_that_is_pinned_with_libtpu() -> None:
    words = shlex.split(instructions("RUN")[0])
    assert "/usr/src/tpunb[tpu]" in words
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch_xla[tpu]==2.9.0" in project["optional-dependencies"]["tpu"]
    python = instructions("FROM")[0].removeprefix("python:").removesuffix("-slim")
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]
