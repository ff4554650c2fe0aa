"""The Kubernetes objects of a run, against JobSet's own schema made strict, and its example."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import nbformat
import pytest
import yaml
from nbformat import v4

from tpunb import cli
from tpunb.kernel import node
from tpunb.places import jobset
from tpunb.places.config import JobSetSettings, PlaceConfig
from tpunb.places.errors import PlaceError
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunSpec
from tpunb.utils.errors import TpunbError

SCHEMA = Path(__file__).parent / "jobset-schema.json"
V6E = """[places.gke]
kind = "jobset"
accelerator = "v6e"
topology = "4x4"
image = "us-docker.pkg.dev/p/r/tpunb:1"
queue = "multislice-queue"
restarts = 4
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
    name = jobset.name_run("nb", config)
    target = jobset.JobSetTarget(config, name)
    ranks = target.choose_cores("all")
    spec = RunSpec(name, "nb", ranks, "TPU", ".", (), (), hosts=target.hosts, **values)
    return list(yaml.safe_load_all(jobset.write_manifest(target, spec, "print(1)\n", {}, "ab")))


def pod_of(objects: list[Any]) -> Any:
    return job_of(objects)["template"]["spec"]


def job_of(objects: list[Any]) -> Any:
    return objects[2]["spec"]["replicatedJobs"][0]["template"]["spec"]


def test_manifest_of_a_notebook_is_valid_for_jobset(
    project: Path, capsys: pytest.CaptureFixture[str], validator: jsonschema.Draft202012Validator
) -> None:
    config, secret, made = manifest(capsys)
    validator.validate(made)
    name = made["metadata"]["name"]
    assert [config["kind"], secret["kind"], made["kind"]] == ["ConfigMap", "Secret", "JobSet"]
    assert (
        config["metadata"]
        == secret["metadata"]
        == {
            "name": name,
            "labels": {"app.kubernetes.io/instance": name},
        }
    )
    assert name.startswith("my-nb-1-")
    assert "print('step', lr)  # prüft" in config["data"]["script.py"]
    spec = RunSpec.from_json(json.loads(config["data"]["spec.json"]))
    assert (spec.id, spec.world_size, spec.device, spec.place) == (name, 16, "TPU", "gke")
    assert spec.hosts == ("node-0", "node-1", "node-2", "node-3")
    assert len(bytes.fromhex(secret["stringData"]["key"])) == 32
    assert not list(project.glob("runs/*"))


def test_manifest_matches_the_v6e_example_of_jobset_and_runs_tpunb_node(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # site/static/examples/tpu-multislice/v6e-jax-workload.yaml at 08dfbdfd
    objects = manifest(capsys)
    job, pod = job_of(objects), pod_of(objects)
    metadata, name = objects[2]["metadata"], objects[2]["metadata"]["name"]
    assert objects[2]["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "multislice-queue"
    assert objects[2]["spec"]["failurePolicy"] == {"maxRestarts": 4}
    assert job["backoffLimit"] == 0
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    [container] = pod["containers"]
    assert container["securityContext"] == {"privileged": True}
    assert container["command"] == ["tpunb", "node"]
    words = container["args"]
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given["--rendezvous"] == f"{name}-node-0-0.{name}:8460"
    assert given["--nnodes"] == "4"
    mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert mounted[given["--files"]] == "run"
    assert mounted[str(Path(given["--key-file"]).parent)] == "key"
    assert set(mounted.values()) == {each["name"] for each in pod["volumes"]}
    assert given["--address"] == "$(POD_IP)"
    assert [each["name"] for each in container["env"]] == ["POD_IP"]


DOCUMENTED = [
    # JobSet, site/static/examples/tpu-multislice: v5e (2x4) and v6e (4x4).
    ("v5e", "2x4", None, "tpu-v5-lite-podslice", 2, 4),
    ("v6e", "4x4", None, "tpu-v6e-slice", 4, 4),
    # GKE's "Deploy TPU workloads": all chips of a v5e host of 8.
    ("v5e", "2x4", 8, "tpu-v5-lite-podslice", 1, 8),
    ("v6e", "1x1", None, "tpu-v6e-slice", 1, 1),
    # JobSets and Jobs that are published: one host and 4 hosts of v5p.
    ("v5p", "2x2x1", None, "tpu-v5p-slice", 1, 4),
    ("v5p", "2x2x4", None, "tpu-v5p-slice", 4, 4),
    # Google's microbenchmarks for tpu7x, and xpk's golden manifest for tpu7x-128.
    ("tpu7x", "2x2x1", None, "tpu7x", 1, 4),
    ("tpu7x", "4x4x4", None, "tpu7x", 16, 4),
]
"""Accelerator, topology, chips of each host if one chooses; then what the example has: label, pods,
google.com/tpu of each."""


@pytest.mark.parametrize(
    ("accelerator", "topology", "asked", "label", "hosts", "chips"), DOCUMENTED
)
def test_manifest_requests_each_accelerator_like_published_examples(
    validator: jsonschema.Draft202012Validator,
    accelerator: str,
    topology: str,
    asked: int | None,
    label: str,
    hosts: int,
    chips: int,
) -> None:
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


def test_manifest_objects_and_pods_are_valid_for_kubernetes(run_with_more: RunDir) -> None:
    """Valid by Kubernetes' own schemas, in which a misspelt field is an error."""
    config = place(namespace="team", service_account="trainer")
    target = jobset.JobSetTarget(config, jobset.name_run("nb", config))
    spec = RunSpec("id", "nb", 16, "TPU", ".", (), (), hosts=target.hosts)
    text = jobset.write_manifest(target, spec, "1\n", {"A": "b"}, "ab", more=run_with_more)
    objects = list(yaml.safe_load_all(text))
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod_of(objects)}
    for each in (*objects[:2], pod):
        kubernetes_validate.validate(each, "1.31", strict=True)


def test_manifest_packs_binary_files_as_an_archive(run_with_more: RunDir, tmp_path: Path) -> None:
    config = place()
    target = jobset.JobSetTarget(config, "nb")
    spec = RunSpec("id", "nb", 16, "TPU", ".", (), (), hosts=target.hosts)
    text = jobset.write_manifest(target, spec, "1\n", {}, "ab", more=run_with_more)
    binary = next(iter(yaml.safe_load_all(text)))["binaryData"]
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    for name, data in binary.items():
        (mounted / name).write_bytes(base64.b64decode(data))
    node._copy_files(mounted, tmp_path / "there")
    assert (tmp_path / "there/arguments.pt").read_bytes() == b"\x00"
    assert (tmp_path / "there/given/a/spec.json").read_text() == "{}"


@pytest.fixture
def run_with_more(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    (run.path / "given/a").mkdir(parents=True)
    (run.path / "given/a/spec.json").write_text("{}")
    (run.path / "arguments.pt").write_bytes(b"\x00")
    return run


def test_manifest_omits_settings_the_place_does_not_have(
    validator: jsonschema.Draft202012Validator,
) -> None:
    plain = made(place())
    assert "kueue.x-k8s.io/queue-name" not in plain[2]["metadata"]["labels"]
    assert "serviceAccountName" not in pod_of(plain)
    full = made(place(namespace="team", service_account="trainer"), grace=30.0)
    validator.validate(full[2])
    assert {each["metadata"]["namespace"] for each in full} == {"team"}
    assert pod_of(full)["serviceAccountName"] == "trainer"
    assert pod_of(full)["terminationGracePeriodSeconds"] == 45


def test_variables_are_only_in_the_kubernetes_secret(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "places.toml").write_text(V6E + 'checkpoints = "gs://b/run"\n')
    notebook("lr = 1", TRAIN.replace("%%tpu_train", "%%tpu_train --env HF_TOKEN=hush"))
    config, secret, made = manifest(capsys)
    name = made["metadata"]["name"]
    variables = json.loads(secret["stringData"]["variables.json"])
    assert variables == {"HF_TOKEN": "hush", "TPUNB_CHECKPOINTS": f"gs://b/run/{name}"}
    assert "hush" not in json.dumps([made, config["data"]["spec.json"]])


def test_checkpoints_without_a_bucket_are_warned_of(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["submit", "My nb_1.ipynb", "--on", "gke", "--manifest"]) == 0
    assert "lost with the pods" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "3d", "Ünï", "x" * 200, "-a.b_c-"])
@pytest.mark.parametrize("topology", ["2x2x1", "16x20x28"])
def test_run_names_are_valid_for_kubernetes(name: str, topology: str) -> None:
    config = place(accelerator="v5p", topology=topology)
    found = jobset.name_run(name, config)
    assert found[0].isalpha()
    assert found.replace("-", "").isalnum()
    assert found == found.lower()
    assert found.isascii()
    assert len(f"{found}-node-0-{config.settings.slice.hosts - 1}-12345") <= 63


def test_a_script_that_is_too_large_is_refused() -> None:
    config = place()
    target = jobset.JobSetTarget(config, jobset.name_run("nb", config))
    spec = RunSpec("id", "nb", 16, "TPU", ".", (), (), hosts=target.hosts)
    with pytest.raises(PlaceError, match=r"script\.py and spec\.json take 1\.\d MB, but a Config"):
        jobset.write_manifest(target, spec, "#" * (1 << 20), {}, "ab")


@pytest.mark.parametrize(
    ("words", "train", "told"),
    [
        (("--manifest", "--detach"), TRAIN, "cannot be combined with --detach or --dry-run"),
        (("--manifest",), TRAIN.replace("train", "train --returns lr"), "--returns"),
        (("--manifest",), TRAIN.replace("train", "train --cores 8", 1), "16 chips"),
        (("--manifest",), TRAIN.replace("train", "train --resume x", 1), "no runs"),
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
    assert cli.main(["submit", "My nb_1.ipynb", "--on", "gke", *words]) == 1
    out, err = capsys.readouterr()
    assert told in err
    assert "apiVersion" not in out


def test_manifest_for_another_kind_of_place_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "places.toml").write_text('[places.gke]\nkind = "ssh"\nhosts = ["a"]\n')
    assert cli.main(["submit", "My nb_1.ipynb", "--on", "gke", "--manifest"]) == 1
    assert 'of kind "ssh", not "jobset"' in capsys.readouterr().err


def test_resume_from_an_earlier_run_needs_its_url() -> None:
    target = jobset.JobSetTarget(place(), "nb")
    with pytest.raises(TpunbError, match="give their URL"):
        target.resume(RunDir("runs/x"))
