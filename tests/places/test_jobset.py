"""The Kubernetes objects of a run, against JobSet's own schema made strict, and its example."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import nbformat
import pytest
import yaml
from nbformat import v4

from tests.fakes import torch_tpu
from tests.fakes.machine import FakeMachine
from tpunb import cli
from tpunb.places import jobset
from tpunb.places.config import JobSetSettings, PlaceConfig

SCHEMA = Path(__file__).parent / "jobset-schema.json"
V6E = """[places.gke]
kind = "jobset"
accelerator = "v6e"
topology = "4x4"
image = "us-docker.pkg.dev/p/r/tpunb:1"
queue = "multislice-queue"
"""
TRAIN = "%%tpu_train\nimport tpunb\nprint('step', lr)  # prüft\ntpunb.save({}, 1)\n"


def strict(schema: Any) -> Any:
    """The schema without additional properties: otherwise a misspelt field passes."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(each) for name, each in schema.items() if name != "properties"}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    if properties := schema.get("properties"):
        made["properties"] = {name: strict(each) for name, each in properties.items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    return made


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = strict(json.loads(SCHEMA.read_text()))
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "places.toml").write_text(V6E)
    notebook("%load_ext tpunb", "lr = 0.1", TRAIN)
    return tmp_path


def notebook(*cells: str) -> None:
    """Write the notebook that is submitted."""
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell(c) for c in cells]), "My nb_1.ipynb")


def manifest(capsys: pytest.CaptureFixture[str], *words: str) -> list[Any]:
    """The objects that `tpunb submit --manifest` prints."""
    code = cli.main(["submit", "My nb_1.ipynb", "--on", "gke", "--manifest", *words])
    out, err = capsys.readouterr()
    assert code == 0, err
    return list(yaml.safe_load_all(out))


def place(**values: Any) -> PlaceConfig:
    settings = {"accelerator": "v6e", "topology": "4x4", "image": "i", **values}
    return PlaceConfig("gke", "jobset", Path("places.toml"), JobSetSettings(**settings))


def made(config: PlaceConfig, **values: Any) -> list[Any]:
    text = jobset.write_manifest(config, "nb-1", "print(1)\n", {"A": "b"}, **values)
    return list(yaml.safe_load_all(text))


def pod_of(objects: list[Any]) -> Any:
    return job_of(objects)["template"]["spec"]


def job_of(objects: list[Any]) -> Any:
    return objects[2]["spec"]["replicatedJobs"][0]["template"]["spec"]


def test_manifest_of_a_notebook_is_valid_and_like_the_v6e_example_of_jobset(
    project: Path, capsys: pytest.CaptureFixture[str], validator: jsonschema.Draft202012Validator
) -> None:
    # site/static/examples/tpu-multislice/v6e-jax-workload.yaml at 08dfbdfd
    notebook(
        "%load_ext tpunb", "lr = 0.1", TRAIN.replace("train", "train --retries 4 --returns lr", 1)
    )
    assert cli.main(["submit", "My nb_1.ipynb", "--on", "gke", "--manifest"]) == 0
    out, err = capsys.readouterr()
    config, _, made = objects = list(yaml.safe_load_all(out))
    validator.validate(made)
    name = made["metadata"]["name"]
    for each in objects:
        assert each["metadata"]["name"] == name
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == name
    assert name.startswith("my-nb-1-")
    assert "lr = 0.1" in config["data"]["script.py"]
    assert "print('step', lr)  # prüft" in config["data"]["script.py"]
    assert out.splitlines()[1].startswith("# kubectl logs -f --prefix --max-log-requests=4 -l ")
    assert f"app.kubernetes.io/instance={name}" in out.splitlines()[1]
    assert "torch_xla" in err  # the backend
    assert "what --returns and --profile bring back stays in the pods" in err
    assert not (project / "runs").exists()
    job, pod = job_of(objects), pod_of(objects)
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "multislice-queue"
    assert made["spec"]["failurePolicy"] == {"maxRestarts": 4}
    assert job["backoffLimit"] == 0
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    [container] = pod["containers"]
    assert container["securityContext"] == {"privileged": True}
    assert container["envFrom"] == [{"secretRef": {"name": name}}]
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}


DOCUMENTED = [
    # JobSet, site/static/examples/tpu-multislice: v5e (2x4) and v6e (4x4).
    ("v5e", "2x4", None, "tpu-v5-lite-podslice", 2, 4),
    ("v6e", "4x4", None, "tpu-v6e-slice", 4, 4),
    # GKE's "Deploy TPU workloads": all chips of a v5e host of 8.
    ("v5e", "2x4", 8, "tpu-v5-lite-podslice", 1, 8),
    ("v6e", "1x1", None, "tpu-v6e-slice", 1, 1),
    # A published JobSet of v5p, and xpk's golden manifest for tpu7x-128.
    ("v5p", "2x2x4", None, "tpu-v5p-slice", 4, 4),
    ("tpu7x", "4x4x4", None, "tpu7x", 16, 4),
]
"""Accelerator, topology, chips of each host if one chooses; then what the example has: label, pods,
google.com/tpu of each."""


@pytest.mark.parametrize("case", DOCUMENTED)
def test_manifest_requests_each_accelerator_like_published_examples(
    validator: jsonschema.Draft202012Validator, case: Any
) -> None:
    accelerator, topology, asked, label, hosts, chips = case
    objects = made(place(accelerator=accelerator, topology=topology, chips_per_host=asked))
    validator.validate(objects[2])
    job, pod = job_of(objects), pod_of(objects)
    assert (job["parallelism"], job["completions"]) == (hosts, hosts)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    resources = pod["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"] == {"google.com/tpu": chips}
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    assert objects[2]["metadata"].get("annotations") == (exclusive if hosts > 1 else None)


def test_manifest_has_the_settings_that_the_place_has_and_is_valid(
    validator: jsonschema.Draft202012Validator,
) -> None:
    """Valid by Kubernetes' own schemas, in which a misspelt field is an error."""
    plain = made(place())
    assert "kueue.x-k8s.io/queue-name" not in plain[2]["metadata"]["labels"]
    assert "serviceAccountName" not in pod_of(plain)
    full = made(place(service_account="trainer"), grace=30.0, timeout=90.0)
    validator.validate(full[2])
    assert pod_of(full)["serviceAccountName"] == "trainer"
    assert pod_of(full)["terminationGracePeriodSeconds"] == 30
    assert job_of(full)["activeDeadlineSeconds"] == 90
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod_of(full)}
    for each in (*full[:2], pod):
        kubernetes_validate.validate(each, "1.31", strict=True)


def test_variables_are_only_in_the_kubernetes_secret(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "places.toml").write_text(V6E + 'checkpoints = "gs://b/run"\n')
    line = "%%tpu_train --env HF_TOKEN=hush --resume gs://b/old"
    notebook("lr = 1", TRAIN.replace("%%tpu_train", line))
    config, secret, made = manifest(capsys)
    name = made["metadata"]["name"]
    assert secret["stringData"] == {
        "HF_TOKEN": "hush",
        "TPUNB_CHECKPOINTS": f"gs://b/run/{name}",
        "TPUNB_RESUME": "gs://b/old",
    }
    assert "hush" not in json.dumps([made, config])


@pytest.mark.parametrize("name", ["", "3d", "Ünï", "x" * 200, "-a.b_c-"])
def test_run_names_are_valid_for_kubernetes(name: str) -> None:
    found = jobset.name_run(name)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", found)
    assert len(f"{found}-node-0-4095-12345") <= 63


@pytest.mark.parametrize(
    ("words", "train", "told"),
    [
        (("--manifest", "--detach"), TRAIN, "cannot be combined with --detach or --dry-run"),
        (("--manifest",), TRAIN.replace("train", "train --cores 8", 1), "--cores 8: place gke has"),
        (("--manifest",), TRAIN.replace("train", "train --resume x", 1), "--resume x: give the"),
        ((), TRAIN, "--manifest > run.yaml`, which kubectl runs"),
        (("--manifest",), TRAIN, 'of kind "ssh", not "jobset"'),
    ],
)
def test_submit_options_that_are_refused(
    project: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    train: str,
    told: str,
) -> None:
    notebook("lr = 1", train)
    if "of kind" in told:
        (project / "places.toml").write_text('[places.gke]\nkind = "ssh"\nhosts = ["a"]\n')
    assert cli.main(["submit", "My nb_1.ipynb", "--on", "gke", *words]) == 1
    out, err = capsys.readouterr()
    assert told in err
    assert "apiVersion" not in out


def test_environment_of_torch_xla_has_what_gke_does_not_set() -> None:
    """The accelerator's name as torch_xla parses it; of a single host, also its shape."""
    four, one = (
        {
            each["name"]: each.get("value")
            for each in pod_of(made(place(topology=shape)))["containers"][0]["env"]
        }
        for shape in ("4x4", "2x2")
    )
    assert four == {"NODE_RANK": None, "PJRT_DEVICE": "TPU", "TPU_ACCELERATOR_TYPE": "v6e-16"}
    assert (one["TPU_ACCELERATOR_TYPE"], one["TPU_WORKER_ID"]) == ("v6e-4", "0")
    assert one["TPU_CHIPS_PER_HOST_BOUNDS"] == "2,2,1"
    [container] = pod_of(made(place(), backend="torchtpu"))["containers"]
    assert [each["name"] for each in container["env"]] == ["NODE_RANK"]


@pytest.mark.usefixtures("starts_processes")
def test_pods_of_a_manifest_for_torchtpu_get_the_variables_of_its_launch(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path / "machine")
    machine.chips("v6e", 4)
    folder = torch_tpu.install(tmp_path / "packages")
    [container] = pod_of(made(place(topology="2x4"), backend="torchtpu"))["containers"]
    python, option, code, program, *_ = container["command"]
    assert (python, option, program) == ("python3", "-c", "torchrun")
    done = subprocess.run(
        [sys.executable, option, code, "env"],
        env={**os.environ, "PYTHONPATH": folder, "NODE_RANK": "1", "TPUNB_ROOT": str(machine.root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    addresses = found["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
    assert (len(addresses), addresses[4]) == (8, "nb-1-node-0-1.nb-1:8070")
    assert "MASTER_ADDR" not in found.keys() - os.environ.keys()
