"""Runs in a cluster: why pods do not begin, and where files are after the pods are gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.drivers.nodes import until
from tests.drivers.places import gke_table, result_of, write_places
from tests.fakes.cluster import Cluster
from tests.support import script_of
from tpunb.places import gke, kinds, kubectl
from tpunb.places.errors import PlaceError
from tpunb.places.gke import GkePlace
from tpunb.places.jobset import JobSetTarget
from tpunb.places.kubectl import Observed, Pod, UnansweredError
from tpunb.places.mirror import Mirror
from tpunb.places.place import Cancelled, ConnectionLost, HostLine, Restarted
from tpunb.places.transport import HostProcess
from tpunb.runs import directory, state, stream
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunSpec
from tpunb.runs.stream import End, Stop
from tpunb.utils.errors import TpunbError

HUSH = {"TOKEN": "hush"}


@pytest.fixture
def cluster(
    starts_processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gke, "AGAIN", 0.2)
    monkeypatch.setattr(gke, "NO_IMAGE", 0.5)
    with Cluster(tmp_path / "cluster") as made:
        for name, value in made.environment().items():
            monkeypatch.setenv(name, value)
        write_place(tmp_path)
        yield made
        until(lambda: not made.left())


def write_place(folder: Path, **values: object) -> None:
    write_places(folder, gke=gke_table(**values))


def target() -> JobSetTarget:
    found = kinds.find_target("gke", Path.cwd(), print, lambda: False)
    assert isinstance(found, JobSetTarget)
    return found


def place(
    train: str = "print('rank', __import__('os').environ['RANK'])", *, detached: bool = True
) -> GkePlace:
    """The place of a new run that is not started yet."""
    found = target()
    script = script_of((), train)
    run = directory.create_run(Path("runs"), "nb")
    run.script.write_text(script.text)
    run.write_spec(
        RunSpec(run.id, "nb", 8, "TPU", ".", (), script.blocks, hosts=found.hosts, place="gke")
    )
    found.placed(run.id, detached=detached).write(run)
    made = kinds.open_place(run)
    assert isinstance(made, GkePlace)
    return made


def again(made: GkePlace) -> GkePlace:
    """The place of the same run, as another process opens it."""
    opened = kinds.open_place(made.run)
    assert isinstance(opened, GkePlace)
    return opened


def objects(cluster: Cluster) -> list[str]:
    kinds_ = ("JobSet", "ConfigMap", "Secret")
    return [kind for kind in kinds_ for _ in cluster.objects(kind)]


def mirrored(made: GkePlace, *, found: bool = True) -> RunResult:
    """Follow the place to the end; return the result in the local run folder."""
    mirror = Mirror(made.run, made, stays=True, again=found)
    if found or mirror.begin({}):
        mirror.follow()
    made.close()
    result = result_of(made.run)
    return result


def quota(cluster: Cluster, folder: Path) -> None:
    cluster.set_queue("team", quota=16, used=12)
    write_place(folder, queue="team", wait=1.0)


def no_node(cluster: Cluster, folder: Path) -> None:
    cluster.nodes = False
    write_place(folder, wait=1.0)


def no_image(cluster: Cluster, folder: Path) -> None:
    cluster.images = set()


def no_secret(cluster: Cluster, folder: Path) -> None:
    cluster.denied.add("create secrets")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (quota, r"not started within 1 s .*: waiting in queue team: .*insufficient unused quota"),
        (
            no_node,
            r"not started within 1 s .*: no node for node-0, node-1 yet: .*cient google.com/tpu",
        ),
        (no_image, r"node-0: its image cannot be pulled: .*image:1.* \(`image` of"),
        (no_secret, r"`kubectl create` failed: .*secrets is forbidden"),
    ],
)
def test_start_failures_on_gke_are_explained_and_leave_no_object(
    cluster: Cluster, tmp_path: Path, fault: Callable[[Cluster, Path], None], told: str
) -> None:
    fault(cluster, tmp_path)
    said: list[str] = []
    with pytest.raises(PlaceError, match=told):
        place().start({}, said.append, lambda: False)
    assert objects(cluster) == []
    if fault is not no_secret:
        assert said[0].startswith("creating JobSet nb-")


def test_interrupt_while_waiting_for_nodes_deletes_everything(cluster: Cluster) -> None:
    cluster.nodes = False
    said: list[str] = []
    with pytest.raises(Cancelled):
        place().start(HUSH, said.append, lambda: len(said) > 1)
    assert objects(cluster) == []


def test_interrupt_that_cannot_delete_objects_shows_the_command(cluster: Cluster) -> None:
    made = place()
    cluster.nodes = False
    said: list[str] = []

    def cancelled() -> bool:
        cluster.unreachable = len(said) > 1
        return cluster.unreachable

    with pytest.raises(Cancelled):
        made.start({}, said.append, cancelled)
    [note] = [event for event in made.run.read_events() if isinstance(event, Note)]
    assert "may still exist, and start or cost money" in note.text
    assert f"kubectl delete jobset,configmap,secret -l {kubectl.INSTANCE}=" in note.text
    cluster.unreachable = False
    made._cluster.delete(made.placed.name)


def test_a_stop_before_the_pods_have_begun_deletes_everything(cluster: Cluster) -> None:
    """Followed by another process than the one that started the run."""
    made = place()
    cluster.nodes = False
    with pytest.raises(RuntimeError):
        made.start({}, raising_at("no node"), lambda: False)
    assert objects(cluster) == []
    made._cluster.create(manifest(made))
    followed = made.follow([{}, {}])
    until(lambda: next(followed) is None and "no node" in phases(made.run))
    made.stop(Stop(reason="enough"))
    said = [each for each in followed if each is not None]
    assert [(each.host, each.line.returncode) for each in said] == [(0, 1), (1, 1)]
    made.close()
    assert objects(cluster) == []


def raising_at(text: str) -> Callable[[str], None]:
    def say(told: str) -> None:
        if text in told:
            raise RuntimeError(told)

    return say


def manifest(made: GkePlace) -> str:
    from tpunb.places.jobset import write_manifest

    target = JobSetTarget(made.placed.place, made.placed.name)
    spec = made.run.read_spec()
    script = made.run.script.read_text()
    return write_manifest(target, spec, script, {}, "ab" * 32, followed=["--linger", "60s"])


def phases(run: RunDir) -> str:
    return "\n".join(getattr(event, "text", "") for event in run.read_events())


def test_log_of_a_pod_that_cannot_be_read_is_retried(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = place()
    pods = {host: Pod(f"p-{host}", host, 0, "Succeeded") for host in range(2)}
    seen = Observed(True, ended="Completed", pods=pods)
    tried: Counter[str] = Counter()

    def run(*words: str, given: str = "") -> str:
        """The second pod's log cannot be read at all."""
        name = words[1]
        tried[name] += 1
        if name == "p-1" or tried[name] == 1:
            raise UnansweredError("busy")
        return "noise\n" + stream.encode(End(0)).decode()

    monkeypatch.setattr(made._cluster, "run", run)
    ended: dict[int, HostLine] = {}
    told: list[HostLine] = []

    def attend() -> bool:
        attending = made._attend(seen, [{}, {}], ended)
        while True:
            try:
                told.append(next(attending))
            except StopIteration as stop:
                return bool(stop.value)

    assert [attend() for _ in range(gke.LOGS)] == [False] * (gke.LOGS - 1) + [True]
    assert told[0] == HostLine(0, End(0))
    assert isinstance(told[1].line, ConnectionLost)


def test_lost_run_message_shows_how_to_delete_the_jobset(cluster: Cluster) -> None:
    made = place(detached=False)
    told = f"`kubectl delete jobset,configmap,secret -l {kubectl.INSTANCE}={made.placed.name}`"
    assert told in state.lost_message(made.run)


def test_late_output_of_old_pods_is_dropped_after_a_jobset_restart(
    cluster: Cluster,
) -> None:
    made = place()
    before = made._said
    assert [said.line for said in made._switch_pods(Observed(True, restarts=1))] == [Restarted()]
    late = stream.encode(stream.Append("run.log", 0, b"late\n", 0.0))
    process = HostProcess(["printf", "%s", late.decode()])
    made._read(0, process, before)
    process.close()
    assert before.get_nowait().line == stream.decode(late)
    assert made._said.empty()


def phase(cluster: Cluster) -> str:
    [jobset] = cluster.objects("JobSet")
    return str(jobset["status"].get("terminalState", ""))


def test_cost_estimate_and_queue_of_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    cluster.set_queue("team", quota=16, used=12)
    write_place(tmp_path, queue="team")
    assert target().estimate.describe(None) == [
        "the cost is not known: the cluster has no such node now",
        "queue team: 2 waiting; 12 of its 16 chips are in use, and this run needs 8",
    ]
    cluster.add_node("tpu-v6e-slice", "2x4", "us-east5-b")
    assert target().estimate.most(3600.0) == pytest.approx(8 * 2.7)
    cluster.denied.add("get nodes")
    assert "you are not allowed to list" in target().estimate.unknown
    write_place(tmp_path, queue="nobody")
    with pytest.raises(PlaceError, match="has no queue 'nobody'"):
        target()


def test_missing_kubectl_is_explained(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(TpunbError, match="`kubectl` is not installed"):
        target()
