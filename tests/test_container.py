"""`docker/Dockerfile`: linted, made of what there is; its entry finds out which host it is."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tpunb import cli
from tpunb.utils.version import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
PLATFORMS = (
    "TPU_WORKER_ID TPU_WORKER_HOSTNAMES TPU_NAME TPU_PROCESS_ADDRESSES TPU_PROCESS_PORT "
    "TPU_SKIP_MDS_QUERY TPU_ACCELERATOR_TYPE CLOUD_TPU_TASK_ID JOB_COMPLETION_INDEX "
    "SKYPILOT_NODE_RANK SKYPILOT_NODE_IPS CLUSTER_SPEC"
).split()


def instructions(name: str) -> list[str]:
    """What follows a word of the Dockerfile, continued lines joined."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    lines = (line.partition(" ") for line in text.splitlines())
    return [rest.strip() for word, _, rest in lines if word == name]


def entry() -> list[str]:
    """The words of `tpunb` that a container starts with."""
    program, *words = json.loads(instructions("ENTRYPOINT")[0])
    assert program == "tpunb"
    return words


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PLATFORMS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")  # where nobody listens


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


@pytest.mark.parametrize(
    ("env", "flags", "told"),
    [
        pytest.param(
            {
                "TPU_WORKER_ID": "3",
                "TPU_WORKER_HOSTNAMES": "s-node-0-0.s,s-node-0-1.s,s-node-0-2.s,s-node-0-3.s",
                "TPU_SKIP_MDS_QUERY": "true",
                "TPU_ACCELERATOR_TYPE": "v6e-16",
                "JOB_COMPLETION_INDEX": "3",
            },
            "",
            "host 3 of 4, known from TPU_WORKER_ID and TPU_WORKER_HOSTNAMES; "
            "host 0 listens at s-node-0-0.s:29477",
            id="GKE",
        ),
        pytest.param(
            {"JOB_COMPLETION_INDEX": "2"},
            "--nnodes 4 --rendezvous s-node-0-0.s:8460",
            "host 2 of 4, known from JOB_COMPLETION_INDEX; host 0 listens at s-node-0-0.s:8460",
            id="JobSet",
        ),
    ],
)
def test_the_entry_says_which_host_it_is(
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    env: Mapping[str, str],
    flags: str,
    told: str,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert cli.main([*entry(), *flags.split(), "--dry-run"]) == 0
    out, err = capfdbinary.readouterr()
    who, versions = out.decode().splitlines()
    assert who == f"tpunb: {told}"
    assert f"tpunb {__version__}" in versions
    assert not err
