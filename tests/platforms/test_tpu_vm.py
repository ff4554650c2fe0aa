"""Which machine may be stopped: this one, if it is a TPU VM of one host that can start again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.platforms.machines import machine
from tests.platforms.vms import ADDRESS, PLACE, found_on, gcloud, path_with, tpu_vm
from tpunb.errors import SetupError
from tpunb.platforms import metadata
from tpunb.platforms.tpu_vm import TpuVm, ours

MINE = TpuVm("my-tpu", "us-central1-a", "my-project", "v6e-8", ADDRESS)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for the metadata server shares this process and its processors."""
    monkeypatch.setattr(metadata, "PATIENT", 30.0)


def test_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = gcloud(tmp_path / "bin")
    monkeypatch.setenv("PATH", path_with(known))
    with tpu_vm(tmp_path / "root") as made:
        found = ours(found_on(made), made.env)
    assert found == MINE
    found.check()
    found.stop()
    assert known.nodes[PLACE]["state"] == "STOPPING"
    asked = ["my-tpu", "--zone=us-central1-a", "--project=my-project", "--quiet"]
    assert known.calls == [
        ["compute", "tpus", "tpu-vm", "describe", *asked, "--format=json"],
        ["compute", "tpus", "tpu-vm", "stop", *asked, "--async"],
    ]


@pytest.mark.parametrize(
    ("dump", "changed", "env", "words"),
    [
        (
            "v5e-8",
            {},
            {},
            r"a spot VM, .* tpu-vm delete my-tpu --zone=us-central1-a --project=my-p",
        ),
        ("v6e-8", {"PREEMPTIBLE": "true"}, {}, "a spot VM, which cannot be started again"),
        ("v5e-16", {}, {}, "one of 4 hosts of a TPU slice, and Google Cloud can only delete"),
        ("v6e-8", {"NODE_ID": "0"}, {}, "made by Compute Engine, not as a TPU VM"),
        ("v6e-8", {"ACCELERATOR_TYPE": ""}, {}, "made by Compute Engine, not as a TPU VM"),
        ("v6e-8", {"CONSUMER_PROJECT_ID": ""}, {}, "names no zone and project"),
        ("v6e-8", {}, {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, "a Kaggle session: it costs quota"),
        ("v6e-8", {}, {"COLAB_RELEASE_TAG": "x"}, r"a Colab runtime: .*runtime.unassign\(\)"),
        ("v6e-8", {}, {"KUBERNETES_SERVICE_HOST": "x"}, "a container of GKE"),
        ("gce", {}, {}, r"is not known to be a TPU VM of Google Cloud"),
        ("laptop", {}, {}, r"is not known to be a TPU VM of Google Cloud"),
    ],
)
def test_none_to_be_stopped(
    dump: str, changed: dict[str, str], env: dict[str, str], words: str, tmp_path: Path
) -> None:
    there = tpu_vm(tmp_path, dump, **changed) if dump.startswith("v") else machine(dump, tmp_path)
    with there as made, pytest.raises(SetupError, match=words):
        ours(found_on(made, env), {**made.env, **env})


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (
            {"networkEndpoints": [{"ipAddress": "10.0.0.9"}]},
            "another machine under the name my-tpu",
        ),
        ({"acceleratorType": "v5p-8"}, "another machine under the name my-tpu .* v5p-8 at 10.128"),
        ({"networkEndpoints": [{"ipAddress": ADDRESS}, {"ipAddress": "x"}]}, "one of 2 hosts"),
        ({"networkEndpoints": []}, "another machine under the name my-tpu"),
        ({"schedulingConfig": {"spot": True}}, "a spot VM"),
        ({"schedulingConfig": {"preemptible": True}}, "a spot VM"),
        ({"state": "PREEMPTED"}, "my-tpu is PREEMPTED, and not READY"),
    ],
)
def test_what_google_cloud_says_otherwise(
    node: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = gcloud(tmp_path, **node)
    monkeypatch.setenv("PATH", path_with(known))
    with pytest.raises(SetupError, match=words):
        MINE.check()
    assert [call[3] for call in known.calls] == ["describe"]


def test_gcloud_that_may_not_or_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = gcloud(tmp_path)
    monkeypatch.setenv("PATH", path_with(known))
    (tmp_path / "denied").touch()
    with pytest.raises(SetupError, match=r"PERMISSION_DENIED.* needs the role TPU Admin"):
        MINE.check()
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(SetupError, match="gcloud is not installed, or not on PATH"):
        MINE.stop()
