"""More of tests/scenarios/test_gke.py, which takes longer."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.drivers.nodes import until
from tests.fakes.cluster import Cluster
from tests.scenarios.test_gke import GO_ON, Project, finished, kill_mirror, project
from tpunb.runs.returns import collect_returns
from tpunb.runs.spec import RunState, StopCause


def test_submit_of_a_notebook_to_gke(project: Project) -> None:
    project.cluster.set_queue("team", quota=16, used=4)
    project.cluster.add_node("tpu-v6e-slice", "2x4", "us-east5-b")
    project.set_place(queue="team")
    train = "import os\nprint('rank', os.environ['RANK'], len(os.environ['WORD']))"
    process = project.start(train, "--env WORD=xyzzy-177")
    out = finished(process)
    assert process.returncode == 0, out
    told = [
        "v6e-8 in us-east5, on demand: $21.60 an hour",
        "queue team: 2 waiting; 4 of its 16 chips are in use, and this run needs 8",
        "creating JobSet nb-",
        *(f"rank {rank} 9" for rank in range(8)),
    ]
    assert [line for line in told if line not in out] == []
    result = project.result()
    assert (result.state, result.place) == (RunState.SUCCEEDED, "gke")
    assert result.hosts == ("node-0", "node-1")
    assert result.cost is not None
    assert result.price is not None
    project.await_nothing_left()
    calls = project.cluster.calls()
    verbs = {
        word for call in calls for word in call if word in ("apply", "create", "exec", "delete")
    }
    assert verbs == {"create", "exec", "delete"}
    # Nothing of kubectl's own credentials is in the folder here, in a pod or a call.
    written = b"".join(path.read_bytes() for path in project.run.path.rglob("*") if path.is_file())
    pods = b"".join(path.read_bytes() for path in (project.cluster.folder / "pods").rglob("log"))
    for where in (written, json.dumps(calls).encode(), out.encode(), pods):
        assert b"hush" not in where
    assert "xyzzy-177" not in json.dumps(calls)


def test_jobset_restart_of_pods_continues_in_the_same_run_folder(
    project: Project, tmp_path: Path
) -> None:
    project.set_place(restarts=1)
    train = (
        f"import os, pathlib, time\nfolder = pathlib.Path({str(tmp_path)!r}, 'seen')\n"
        "folder.mkdir(exist_ok=True)\nseen = folder / os.environ['RANK']\n"
        "first = not seen.exists()\nprint('first' if first else 'again', flush=True)\n"
        "seen.touch()\nwhile len(list(folder.iterdir())) < 8:\n    time.sleep(0.05)\n"
        "if first and os.environ['RANK'] == '5':\n    raise ValueError('once')\n"
        "while first:\n    time.sleep(0.05)\n"
    )
    process = project.start(train)
    out = finished(process)
    assert process.returncode == 0, out
    assert "JobSet has started all pods again (restart 1 of 1)" in out
    assert project.log().count("again") == 8
    assert "first" in project.log()
    assert {path.name for path in project.run.path.glob("attempts/*")} == {"0", "1"}
    assert [line for line in project.log() if line.endswith("ValueError: once")]
    assert (project.run.path / "attempts/0/5/error.json").exists()
    assert not (project.run.path / "attempts/1/5/error.json").exists()
    assert project.result().state is RunState.SUCCEEDED


def test_evicted_pod_restarts_but_a_timeout_does_not(project: Project, tmp_path: Path) -> None:
    project.set_place(restarts=2)
    process = project.start(GO_ON, "--timeout 12s")
    project.await_lines("begun", 8)
    project.cluster.evict(1)
    project.await_lines("begun", 16)
    finished(process)
    result = project.result()
    assert (result.state, result.attempts) == (RunState.TIMED_OUT, 2)


def test_lost_connection_and_unreachable_cluster_lose_no_log_lines(
    project: Project, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    train = (
        f"import os, time\nprint('begun', flush=True)\nwhile not os.path.exists({str(go)!r}):\n"
        "    time.sleep(0.05)\nprint('after', flush=True)\n"
    )
    process = project.start(train)
    project.await_lines("begun", 8)
    project.cluster.unreachable = True
    project.cluster.cut()
    go.touch()
    until(lambda: "the cluster does not answer" in project.run.events.read_text())
    project.cluster.unreachable = False
    out = finished(process)
    assert process.returncode == 0, out
    assert sorted(project.log()) == ["after"] * 8 + ["begun"] * 8


def test_kernel_death_stops_the_gke_run(project: Project) -> None:
    process = project.start(GO_ON)
    project.await_lines("begun", 8)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    project.await_nothing_left()
    result = project.result()
    assert result.stop is not None
    assert result.stop.cause is StopCause.KERNEL_GONE


def test_detached_gke_run_is_attached_again_after_its_mirror_died(
    project: Project, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    train = (
        f"import os, time\nprint('begun', flush=True)\nwhile not os.path.exists({str(go)!r}):\n"
        "    time.sleep(0.05)\nprint('after', flush=True)\n"
    )
    process = project.start(train, "", "--detach")
    out = finished(process)
    assert process.returncode == 0, out
    project.await_lines("begun", 8)
    kill_mirror(project.run)
    go.touch()
    process = project.tpunb("attach")
    out = finished(process)
    assert process.returncode == 0, out
    assert sorted(project.log()) == ["after"] * 8 + ["begun"] * 8


@pytest.mark.usefixtures("starts_processes")
def test_returns_and_checkpoint_resume_after_a_gke_restart(tmp_path: Path) -> None:
    """With torch in the rank."""
    with Cluster(tmp_path / "cluster", tpunb=("-m", "tpunb")) as cluster:
        (tmp_path / "project").mkdir()
        project = Project(tmp_path / "project", cluster)
        checkpoints = f"file://{tmp_path}/bucket"
        project.set_place(topology="1x1", restarts=1, checkpoints=checkpoints)
        train = (
            "import torch, tpunb\nsaved = tpunb.load()\n"
            "if saved is None:\n    tpunb.save({'w': torch.ones(2)}, 3)\n"
            "    raise ValueError('once')\nvalue = saved.state['w'].sum().item()\n"
        )
        out = finished(project.start(train, "--returns value"))
        result = project.result()
        assert result.state is RunState.SUCCEEDED, out
        assert collect_returns(result, project.run.read_spec()).returns == {"value": 2.0}
        assert {path.name for path in project.run.path.glob("attempts/*")} == {"0", "1"}
        project.await_nothing_left()
