"""More of tests/places/test_gke.py, which takes longer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.drivers.nodes import until
from tests.drivers.places import printed
from tests.fakes.cluster import Cluster
from tests.places.test_gke import (
    again,
    cluster,
    mirrored,
    objects,
    phase,
    place,
    target,
    write_place,
)
from tpunb.places import gke, kinds
from tpunb.places.config import find_place
from tpunb.places.kubectl import UnansweredError
from tpunb.places.place import HostLine
from tpunb.runs.spec import Profile, RunState


def test_logs_and_files_of_deleted_pods_come_from_the_bucket(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gke, "LINGER", 0.1)
    write_place(tmp_path, checkpoints=f"file://{tmp_path}/bucket")
    made = place()
    url = target().checkpoints(made.run.id)
    made.start({"TPUNB_CHECKPOINTS": str(url)}, print, lambda: False)
    until(lambda: phase(cluster) == "Completed")
    made._cluster.delete(made.placed.name)
    until(lambda: not cluster.pods())
    found = again(made)
    assert mirrored(found).state is RunState.SUCCEEDED
    assert sorted(printed(made.run)) == [f"rank {rank}" for rank in range(8)]
    names = {
        path.relative_to(made.run.path).as_posix() for path in found.fetch(["*"], made.run.path)
    }
    assert "attempts/0/0/stdout.log" not in names  # part of the stream


def test_profile_is_fetched_before_the_pods_end(cluster: Cluster) -> None:
    train = (
        "import pathlib\n[run] = pathlib.Path('runs').iterdir()\n"
        "(run / 'profile').mkdir(exist_ok=True)\n(run / 'profile/trace').write_text('x')\n"
    )
    made = place(train)
    spec = made.run.read_spec()
    made.run.write_spec(replace(spec, profile=Profile((0,), 1, 2)))
    assert mirrored(made, found=False).state is RunState.SUCCEEDED
    assert (made.run.path / "profile/trace").read_text() == "x"
    assert objects(cluster) == []


def test_deleted_jobset_ends_the_run(cluster: Cluster) -> None:
    made = place("import time\ntime.sleep(600)")
    made.start({}, print, lambda: False)
    lines: list[HostLine] = []
    for said in made.follow([{}, {}]):
        if said is not None:
            lines.append(said)
        if len(made._connections) == 2 and objects(cluster):
            made._cluster.delete(made.placed.name)
    made.close()
    gone = [
        said.line for said in lines if said.line.__class__.__name__ in ("ConnectionLost", "End")
    ]
    assert len(gone) == 2


def test_doctor_names_the_queue_only_for_queue_problems(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_place(tmp_path, queue="nobody")
    [(what, _)] = kinds.inspect_place("gke", Path.cwd()).problems()
    assert what == "queue"

    def fail(*given: object) -> None:
        raise UnansweredError("i/o timeout")

    monkeypatch.setattr(gke, "find_cluster", fail)
    place = find_place("gke", Path.cwd())
    assert gke.inspect_cluster(place).problems() == [("cluster", "i/o timeout")]


def test_doctor_lists_missing_permissions_and_jobset(cluster: Cluster, tmp_path: Path) -> None:
    report = kinds.inspect_place("gke", Path.cwd())
    assert report.problems() == []
    assert "ready: %%tpu_train --on gke runs on v6e-8, 2 pods of 4 chips" in report.text()
    cluster.denied |= {"create pods/exec", "create secrets"}
    report = kinds.inspect_place("gke", Path.cwd())
    assert report.problems() == [("permissions", "denied: create secrets, create pods/exec")]
    cluster._objects.pop(("CustomResourceDefinition", "jobsets.jobset.x-k8s.io"))
    assert "JobSet is not installed" in kinds.inspect_place("gke", Path.cwd()).text()
    cluster.unreachable = True
    [(what, told)] = kinds.inspect_place("gke", Path.cwd()).problems()
    assert (what, "i/o timeout" in told) == ("cluster", True)
