"""A run in a cluster of Kubernetes (GKE), by JobSet: its five calls over `kubectl`.

create   ConfigMap, Secret and JobSet (`jobset`), with `kubectl create`
wait     Kueue admits the JobSet, nodes come, images are pulled; bounded, and each told by name
follow   `kubectl exec … tpunb node --follow --linger` in each pod: the streams of hosts that
ssh reaches as well. JobSet starts all pods again after a failure: the folder here
goes on with theirs
end      pods linger until everything is here, then the objects are deleted. What nobody has
taken is in the pods' logs, and in the bucket where the run saves
"""

from __future__ import annotations

import json
import queue
import secrets
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpunb.machine import prices
from tpunb.places import bucket, kubectl
from tpunb.places.config import JobSetSettings, PlaceConfig
from tpunb.places.errors import PlaceError, list_hosts
from tpunb.places.hosts import ALIVE, LOOK, WAITING, HostsPlace
from tpunb.places.jobset import JobSetRun, JobSetTarget, write_manifest
from tpunb.places.kubectl import CONTAINER, Kubectl, Pod, Seen, UnansweredError
from tpunb.places.place import Cancelled, HostGone, Place, PlacedRun, Restarted, Said
from tpunb.places.target import Estimate, Kind
from tpunb.runs import stream
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note, Phase
from tpunb.runs.folder_stream import FolderStream
from tpunb.runs.spec import PhaseKind, RunState, StopCause
from tpunb.runs.stream import Alive, End, Taken
from tpunb.utils import records
from tpunb.utils.errors import TpunbError
from tpunb.utils.text import duration

AGAIN = 2.0
"""Seconds between two looks at the cluster while something is waited for, and …"""
SELDOM = 20.0
"""… while all pods are followed."""
NO_IMAGE = 60.0
"""Seconds for which an image may not be pulled, or a container not be made."""
UNREACHED = 900.0
"""Seconds for which the cluster may not answer before nobody waits for it any more."""
LINGER = 120.0
"""Seconds for which the files of a run that has ended wait in its pods for who follows."""
ALONE = 600.0
"""Seconds after which a run that is not detached is stopped if nobody follows it."""
TRIES = 20
"""How often a pod that runs may be reached without a word from it."""
LOGS = 5
"""How often it is tried to read the log of a pod that has ended."""
ENDING = 60.0
"""Seconds beyond the grace period until pods that do not end are deleted."""


class PodTransport:
    """Shells in the pods of a run, by `kubectl exec`."""

    def __init__(self, cluster: Kubectl, names: tuple[str, ...]) -> None:
        self.hosts = names
        self.pods: dict[int, str] = {}
        """The present pod of each host."""
        self._cluster = cluster

    def command(self, host: int, remote: str) -> list[str]:
        """Raises PlaceError where the host has no pod."""
        if host not in self.pods:
            raise PlaceError(f"{self.hosts[host]} has no pod (any more)")
        words = ["exec", "-i", self.pods[host], "-c", CONTAINER, "--", "sh", "-c", remote]
        return self._cluster.command(*words)

    def log(self, host: int) -> list[str]:
        """The command that prints what a pod that has ended has printed."""
        return self._cluster.command("logs", self.pods[host], "-c", CONTAINER)

    def shell(self, host: int) -> None:
        return None

    def reorder(self, order: Sequence[int]) -> None:
        """They have their order: pod i is host i."""


class GkePlace(HostsPlace):
    """One run in a cluster."""

    placed: JobSetRun

    def __init__(self, run: RunDir, placed: JobSetRun) -> None:
        self._settings = _settings(placed.place)
        self._cluster = Kubectl(self._settings)
        self._pods = PodTransport(self._cluster, placed.hosts)
        super().__init__(run, placed, self._pods)
        self._over = False
        """Everything has ended and is here: the objects can go."""
        self._told = ""
        self._unread: Counter[int] = Counter()
        """How often the log of each host's pod, which has ended, could not be read."""

    # Starting

    def start(
        self,
        variables: Mapping[str, str],
        say: Callable[[str], None],
        cancelled: Callable[[], bool],
    ) -> None:
        spec = self.run.read_spec()
        target = JobSetTarget(self.placed.place, self.placed.name)
        followed = ["--linger", f"{LINGER:g}s"]
        if not self.placed.detached:
            followed += ["--alone", f"{ALONE:g}s"]
        script = self.run.script.read_text(encoding="utf-8")
        key = secrets.token_hex(32)
        manifest = write_manifest(
            target, spec, script, variables, key, more=self.run, followed=followed
        )
        if cancelled():
            raise Cancelled
        say(f"creating JobSet {self.placed.name}")
        try:
            self._cluster.create(manifest)
            for told in self._wait_for_pods():
                if cancelled():
                    raise Cancelled
                if told:
                    say(told)
        except BaseException as error:
            left = self._delete()
            if left and isinstance(error, TpunbError):
                raise PlaceError(f"{error}\n{left}") from None
            if left:
                self.run.emit(Note(left))
            raise

    def _wait_for_pods(self) -> Iterator[str]:
        """Until every pod has begun: what is waited for, each time that is something else.

        '' in between. Raises PlaceError where it is for nothing, or takes too long.
        """
        began, told = time.monotonic(), ""
        broken_since: float | None = None
        unreached: float | None = None
        hosts = len(self.placed.hosts)
        while True:
            try:
                seen = self._cluster.look(self.placed.name)
                waits = self._describe(seen)
                unreached = None
            except UnansweredError as error:
                unreached = unreached or time.monotonic()
                if time.monotonic() - unreached > UNREACHED:
                    raise
                yield self._once(str(error))
                yield from _pause(AGAIN)
                continue
            if len(begun_pods(seen)) == hosts or seen.restarts > 0:
                return
            if not seen.exists:
                raise PlaceError(f"JobSet {self.placed.name} is not there: somebody deleted it")
            if seen.ended:
                raise PlaceError(f"JobSet {self.placed.name} has ended as {seen.ended}: {waits}")
            broken = [p for p in seen.pods.values() if p.waits in kubectl.NO_IMAGE | _NOT_MADE]
            broken_since = (broken_since or time.monotonic()) if broken else None
            if broken_since is not None and time.monotonic() - broken_since >= NO_IMAGE:
                raise PlaceError(
                    f"{waits}. It is `image` of [places.{self.placed.place.name}]: "
                    f"{self._settings.image}",
                    self.placed.place.file,
                    f"places.{self.placed.place.name}.image",
                )
            if time.monotonic() - began > self._settings.wait:
                raise PlaceError(
                    f"no room in {duration(self._settings.wait)} (`wait` of "
                    f"[places.{self.placed.place.name}]): {waits}"
                )
            if waits != told:
                told = waits
                yield waits
            yield from _pause(AGAIN)

    def _once(self, text: str) -> str:
        """The text, unless it was the last one."""
        said, self._told = self._told, text
        return "" if said == text else text

    def _describe(self, seen: Seen) -> str:
        """What the run waits for, in words."""
        name, settings = self.placed.name, self._settings
        hosts = len(self.placed.hosts)
        waiting = [pod for _, pod in sorted(seen.pods.items()) if pod.phase == "Pending"]
        if seen.ended:
            return seen.told
        if seen.suspended:
            why = self._cluster.why_not_admitted(seen.uid)
            return f"waiting in queue {settings.queue}: {why or 'not admitted yet'}"
        if len(seen.pods) < hosts:
            why = self._cluster.warnings(name, f"{name}-node-0")
            return f"waiting for the pods of {name}" + (f": {why}" if why else "")
        for pod in waiting:
            host = self.placed.hosts[pod.index]
            if pod.waits in kubectl.NO_IMAGE:
                return f"{host}: its image cannot be pulled: {pod.told}"
            if pod.waits in _NOT_MADE:
                return f"{host}: its container cannot be made: {pod.told}"
        lacking = [pod for pod in waiting if pod.unscheduled]
        if lacking:
            names = list_hosts([self.placed.hosts[pod.index] for pod in lacking])
            return f"no node for {names} yet: {lacking[0].told}"
        names = list_hosts([self.placed.hosts[pod.index] for pod in waiting])
        return f"pulling the image on the nodes of {names}"

    # Following

    def follow(self, since: Sequence[Mapping[str, int]]) -> Iterator[Said | None]:
        hosts = range(len(self.placed.hosts))
        ended: dict[int, Said] = {}
        """Hosts whose run has ended; who says so has not been told yet."""
        looked = alive = float("-inf")
        silent: Counter[int] = Counter()
        begun = bool(self._pods.pods)
        unreached: float | None = None
        stopped: float | None = None
        while True:
            now = time.monotonic()
            if now - alive >= ALIVE:
                alive = now
                for connection in self._connections.values():
                    connection.tell(stream.encode(Alive()))
            if self._stops and stopped is None:
                stopped, looked = now, float("-inf")
            followed = all(host in self._connections or host in ended for host in hosts)
            quiet = followed and not ended and stopped is None
            if now - looked >= (SELDOM if quiet else AGAIN):
                try:
                    seen = self._cluster.look(self.placed.name)
                    unreached = None
                except UnansweredError as error:
                    looked, unreached = now, unreached or now
                    if text := self._once(f"the cluster does not answer: {error}"):
                        self.run.emit(Note(text))
                    if now - unreached > UNREACHED and not followed:
                        self.run.emit(Note(self._left_behind(str(error))))
                        for host in set(hosts) - set(ended):
                            yield Said(host, HostGone(f"the cluster does not answer: {error}"))
                        return
                    yield None
                    continue
                looked = time.monotonic()
                if seen.restarts > self.placed.restart:
                    yield from self._go_on(seen)
                    ended.clear()
                    continue
                begun = begun or bool(begun_pods(seen))
                if stopped is not None and not begun:
                    self._over = True
                    yield from (Said(host, End(1)) for host in hosts)
                    return
                if stopped is not None and now - stopped > self.run.read_spec().grace + ENDING:
                    if left := self._delete():
                        self.run.emit(Note(left))
                    yield from self._gone(ended, "it has not ended after a stop: deleted")
                    return
                final = yield from self._attend(seen, since, ended)
                if final:
                    return
                waits = not over(seen) and len(begun_pods(seen)) < len(hosts)
                if waits and (told := self._once(self._describe(seen))):
                    self.run.emit(Phase(PhaseKind.STARTING, told))
            try:
                said = self._said.get(timeout=LOOK)
            except queue.Empty:
                yield None
                continue
            if isinstance(said.line, HostGone):
                present = self._connections.get(said.host)
                if present is not None and present.process.returncode is None:
                    continue  # of the one before
                self._close(said.host)
                silent[said.host] += 1
                if silent[said.host] == TRIES:
                    reason = f"it runs, and is not reached: {said.line.reason}"
                    ended[said.host] = Said(said.host, HostGone(reason, final=True))
                looked = min(looked, time.monotonic() - AGAIN + LOOK)  # soon, and not at once
            elif isinstance(said.line, End):
                ended[said.host] = said
                if len(ended) == len(hosts):
                    if not self._will_restart(ended):
                        self._over = True
                        yield from ended.values()
                        return
                    for connection in self._connections.values():
                        connection.tell(stream.encode(Taken()))
            else:
                silent.clear()
                yield said

    def _will_restart(self, ended: Mapping[int, Said]) -> bool:
        """Whether JobSet will start all pods again."""
        result = records.read_dict(self.run.path / "hosts/0/result.json")
        stop = result.get("stop")
        by_user = isinstance(stop, dict) and stop.get("cause") == StopCause.USER
        if self._stops or by_user or result.get("state") == RunState.TIMED_OUT:
            return False  # the pods have ended as if all was well
        codes = [said.line.returncode for said in ended.values() if isinstance(said.line, End)]
        return any(codes) and self.placed.restart < self._settings.restarts

    def _go_on(self, seen: Seen) -> Iterator[Said]:
        """JobSet has started all pods again."""
        for host in list(self._connections):
            self._close(host)
        while not self._said.empty():
            if not isinstance((said := self._said.get()).line, (HostGone, End)):
                yield said
        # A thread that still reads one of them must not put its lines behind this.
        self._said = queue.Queue(WAITING)
        self._pods.pods.clear()
        self._unread.clear()
        yield Said(0, Restarted())
        self.placed = replace(self.placed, restart=seen.restarts)
        self.placed.write(self.run)
        text = f"JobSet has started all pods again (restart {seen.restarts} of {seen.allowed})"
        self.run.emit(Note(text))

    def _attend(
        self, seen: Seen, since: Sequence[Mapping[str, int]], ended: dict[int, Said]
    ) -> Generator[Said, None, bool]:
        """Connect to pods that are not followed; True if nothing more can come."""
        later = False
        for host in range(len(self.placed.hosts)):
            if host in self._connections or host in ended:
                continue
            pod = seen.pods.get(host)
            if pod is None or pod.leaving:
                continue
            if pod.phase == "Running":
                self._pods.pods[host] = pod.name
                self._look_again(host, since[host])
            elif pod.phase in ("Succeeded", "Failed") and self._pods.pods.get(host) != "":
                self._pods.pods[host] = pod.name
                if (yield from self._read_log(host, ended)) or self._unread[host] == LOGS:
                    self._pods.pods[host] = ""  # once
                else:
                    later = True
        left = [h for h in range(len(self.placed.hosts)) if h not in ended]
        if not left:
            if self._will_restart(ended) and not over(seen):
                return False  # the pods have not gone yet
            self._over = True
            yield from ended.values()
            return True
        if later or not over(seen) or any(host in self._connections for host in left):
            return False
        self._over = True
        why = seen.told if seen.exists else f"JobSet {self.placed.name} was deleted"
        yield from self._gone(ended, why or f"its JobSet has ended as {seen.ended}", seen)
        return True

    def _gone(
        self, ended: Mapping[int, Said], why: str, seen: Seen | None = None
    ) -> Iterator[Said]:
        """Of every host: its end, from the bucket if need be, or why there is none."""
        for host in range(len(self.placed.hosts)):
            if host in ended:
                yield ended[host]
                continue
            pod = None if seen is None else seen.pods.get(host)
            told = f"{why}; {pod.told}" if pod is not None and pod.told else why
            yield from self._from_bucket(host, told)

    def _read_log(self, host: int, ended: dict[int, Said]) -> Generator[Said, None, bool]:
        """What the pod of a run that has ended has left in its log, as lines of a stream.

        False if it could not be read.
        """
        reader = stream.StreamReader(1 << 24)
        try:
            told = self._cluster.run(*self._pods.log(host)[1 + len(self._cluster.flags) :])
        except UnansweredError:
            self._unread[host] += 1
            return False
        for said in reader.feed(told.encode()):
            if isinstance(said, End):
                ended[host] = Said(host, said)
            elif not isinstance(said, str):
                yield Said(host, said)
        return True

    def _from_bucket(self, host: int, why: str) -> Iterator[Said]:
        """What a pod that is gone has left where the run saves."""
        url = self._url()
        if "://" in url:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = bucket.get_files(url, host, ["*"], Path(folder))
                except PlaceError as error:
                    found, why = [], f"{why}; {error}"
                copied = RunDir(folder)
                if found:
                    for line in FolderStream(copied).read(last=True):
                        yield Said(host, line)
                    result = copied.read_result()
                    if result is not None:
                        yield Said(host, End(result.returncode or 0))
                        return
        yield Said(host, HostGone(why, final=True))

    def _url(self) -> str:
        """Where the run saves; '' if it keeps that in its pods."""
        shared = self._settings.checkpoints
        return f"{shared.rstrip('/')}/{self.run.id}" if shared else ""

    def _look_again(self, host: int, since: Mapping[str, int]) -> None:
        words = ["node", "--run", self.placed.folders[host], "--follow", "--since", "-"]
        command = f"exec tpunb {shlex.join([*words, '--stream', '--linger', f'{LINGER:g}s'])}"
        first = (json.dumps(dict(since)) + "\n").encode()
        self._connect(host, command, first + b"".join(map(stream.encode, self._stops)))

    def let_go(self) -> None:
        """The stop has been passed on: what the pods still say is taken to its end."""

    def fetch(
        self, patterns: Sequence[str], into: Path, hosts: Sequence[int] | None = None
    ) -> list[Path]:
        """From the pods while they are there, else from the bucket."""
        chosen = range(len(self.placed.hosts)) if hosts is None else hosts
        seen = self._cluster.look(self.placed.name)
        running = {host: pod.name for host, pod in seen.pods.items() if pod.phase == "Running"}
        if all(host in running for host in chosen):
            self._pods.pods.update(running)
            return super().fetch(patterns, into, hosts)
        if "://" not in self._url():
            raise PlaceError(
                f"the pods of run {self.run.id} are gone, and what was in them: name a URL "
                f"(gs://…) as `checkpoints` of [places.{self.placed.place.name}] for later runs"
            )
        fetched = []
        spec = self.run.read_spec()
        with tempfile.TemporaryDirectory(dir=into) as folder:
            for host in chosen:
                part = Path(folder, str(host))
                for path in bucket.get_files(self._url(), host, patterns, part):
                    name = path.relative_to(part).as_posix()
                    if name.split("/")[0] in stream.OWN or stream.is_streamed(name):
                        continue  # what the folder here has for the whole run
                    there = into / stream.place_in_union(name, host, spec.ranks_on(host))
                    there.parent.mkdir(parents=True, exist_ok=True)
                    fetched.append(path.replace(there))
        return fetched

    def state(self) -> RunState | None:
        try:
            seen = self._cluster.look(self.placed.name)
        except UnansweredError:
            return None
        if seen.exists and any(pod.phase == "Running" for pod in seen.pods.values()):
            return RunState.RUNNING
        return RunState.WAITING if seen.exists and not seen.ended else None

    # Ending

    def close(self) -> None:
        """End every connection; of a run that has ended, let the pods go and delete its objects."""
        if self._over:
            if self._connections and self.run.read_spec().profile is not None:
                try:  # what only the pods have
                    self.fetch(["profile"], self.run.path)
                except (TpunbError, OSError) as error:
                    self.run.emit(Note(f"the profile has not come: {error}"))
            for connection in self._connections.values():
                connection.tell(stream.encode(Taken()))
            if left := self._delete():
                self.run.emit(Note(left))
        super().close()

    def _delete(self) -> str:
        """Delete the run's objects; what to tell if that fails."""
        problem = ""
        for _ in range(3):
            try:
                self._cluster.delete(self.placed.name)
                return ""
            except TpunbError as error:
                problem = str(error)
                time.sleep(AGAIN)
        return self._left_behind(problem)

    def _left_behind(self, problem: str) -> str:
        """That the objects of the run may be there still, and how they are deleted."""
        words = shlex.join(
            self._cluster.command(
                *("delete", "jobset,configmap,secret", "-l"),
                f"{kubectl.INSTANCE}={self.placed.name}",
            )
        )
        return (
            f"JobSet {self.placed.name} may still be there, and start or cost: {problem}. "
            f"Delete it: {words}"
        )


_NOT_MADE = kubectl.NOT_MADE


def begun_pods(seen: Seen) -> list[Pod]:
    """Those whose container has begun."""
    return [pod for pod in seen.pods.values() if pod.phase != "Pending"]


def over(seen: Seen) -> bool:
    """Whether no pod of the run will begin any more."""
    return not seen.exists or bool(seen.ended)


def _pause(seconds: float) -> Iterator[str]:
    """In pieces, so that who waits hears of a stop."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(LOOK)
        yield ""


def _settings(place: PlaceConfig) -> JobSetSettings:
    assert isinstance(place.settings, JobSetSettings)
    return place.settings


# Before a run


def find_cluster(
    place: PlaceConfig, cwd: Path, say: Callable[[str], None], cancelled: Callable[[], bool]
) -> JobSetTarget:
    """Ask a cluster for its queue and what its nodes cost. Raises PlaceError."""
    settings = _settings(place)
    cluster = Kubectl(settings)
    say(f"asking the cluster of place {place.name}")
    notes = []
    if settings.queue:
        found = cluster.get(kubectl.QUEUES, settings.queue)
        if not found:
            raise PlaceError(
                f"place {place.name}: the cluster has no queue {settings.queue!r} in this "
                "namespace (`kubectl get localqueues`)",
                place.file,
                f"places.{place.name}.queue",
            )
        notes = _describe_queue(cluster, settings, found)
    if cancelled():
        raise TpunbError("interrupted before the run began: nothing was started")
    price, unknown = _price(cluster, settings)
    asked = Estimate(price, unknown, notes=tuple(notes), starts=1 + settings.restarts)
    return JobSetTarget(place, asked=asked)


def _describe_queue(
    cluster: Kubectl, settings: JobSetSettings, found: Mapping[str, Any]
) -> list[str]:
    """How long the queue is, and how much of its quota is left, as far as one may ask."""
    waiting = int((found.get("status") or {}).get("pendingWorkloads") or 0)
    told = f"queue {settings.queue}: {waiting} waiting"
    owner = str((found.get("spec") or {}).get("clusterQueue") or "")
    try:
        queued = cluster.get("clusterqueues.kueue.x-k8s.io", owner) if owner else {}
    except UnansweredError:  # not everybody may
        return [told]
    quota = used = 0
    for group in (queued.get("spec") or {}).get("resourceGroups") or []:
        for flavor in group.get("flavors") or []:
            quota += _chips(flavor.get("resources"), "nominalQuota")
    for flavor in (queued.get("status") or {}).get("flavorsUsage") or []:
        used += _chips(flavor.get("resources"), "total")
    need = settings.slice.hosts * settings.slice.chips
    if quota:
        told += f"; {used} of its {quota} chips are in use, and this run needs {need}"
    return [told]


def _chips(resources: object, key: str) -> int:
    """google.com/tpu of a list of resources."""
    listed = resources if isinstance(resources, list) else []
    found = [each.get(key) for each in listed if each.get("name") == "google.com/tpu"]
    return sum(int(each) for each in found if str(each).isdecimal())


def _price(cluster: Kubectl, settings: JobSetSettings) -> tuple[Any, str]:
    """Of an hour of the slice, by where its nodes are; and why it is not known."""
    own = settings.slice
    labels = {
        "cloud.google.com/gke-tpu-accelerator": own.accelerator.label,
        "cloud.google.com/gke-tpu-topology": own.topology,
    }
    chosen = ",".join(f"{name}={value}" for name, value in labels.items())
    try:
        nodes = cluster.items("nodes", "-l", chosen)
    except UnansweredError:
        return None, "you may not ask the cluster for its nodes, which say where they are"
    where = {
        (
            str(each["metadata"].get("labels", {}).get("topology.kubernetes.io/zone", "")),
            each["metadata"].get("labels", {}).get("cloud.google.com/gke-spot") == "true",
        )
        for each in nodes
    }
    if len(where) != 1:
        what = "nodes in several zones or of several prices" if where else "no such node now"
        return None, f"the cluster has {what}"
    [(zone, spot)] = where
    found = prices.price(own.accelerator_type, zone, spot)
    unknown = "" if found else f"the price list has no {own.accelerator_type} in {zone}"
    return found, unknown


# tpunb doctor


@dataclass(frozen=True)
class ClusterReport:
    """What `tpunb doctor --on` finds out about a cluster."""

    place: PlaceConfig
    checks: tuple[tuple[str, str, bool], ...]
    """What was looked at, what was found, and whether a run can do with it."""
    target: JobSetTarget | None

    def problems(self) -> list[tuple[str, str]]:
        """What forbids a run, by what was looked at."""
        return [(what, found) for what, found, good in self.checks if not good]

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "place": self.place.name,
            "kind": self.place.kind,
            "checks": [{"what": w, "found": f, "good": good} for w, f, good in self.checks],
            "problems": [{"host": w, "message": found} for w, found in self.problems()],
        }

    def text(self) -> str:
        """For a terminal."""
        lines = [f"place {self.place.name} ({self.place.kind}, {self.place.file})"]
        width = max(len(what) for what, _, _ in self.checks)
        lines += [
            f"{'' if good else 'problem: '}{what.ljust(width)}  {found}"
            for what, found, good in self.checks
        ]
        if self.target is not None and not self.problems():
            lines += [f"note: {told}" for told in self.target.asked.describe(None)]
            slice_ = self.target.settings.slice
            lines.append(
                f"ready: %%tpu_train --on {self.place.name} runs on {slice_.accelerator_type}, "
                f"{slice_.hosts} pods of {slice_.chips} chips"
            )
        return "\n".join(lines)


_OBJECTS = (kubectl.JOBSETS, "configmaps", "secrets")
NEEDED = (
    *(("create", what) for what in _OBJECTS),
    *(("delete", what) for what in _OBJECTS),
    *(("get", what) for what in (kubectl.JOBSETS, "pods", "pods/log", "events")),
    ("create", "pods/exec"),
)
"""What somebody must be allowed to do, as `kubectl auth can-i` asks."""


def inspect_cluster(place: PlaceConfig) -> ClusterReport:
    """Look whether a run can be started in a cluster; nothing is. Raises PlaceError."""
    settings = _settings(place)
    cluster = Kubectl(settings)
    checks: list[tuple[str, str, bool]] = []
    try:
        client = json.loads(cluster.run("version", "--client", "-o", "json"))
        version = client.get("clientVersion", {}).get("gitVersion", "?")
        checks.append(("kubectl", version, True))
        context = settings.context or cluster.run("config", "current-context").strip()
        checks.append(("context", context, True))
    except PlaceError as error:
        return ClusterReport(place, (*checks, ("kubectl", str(error), False)), None)
    try:
        crd = cluster.get("customresourcedefinitions", "jobsets.jobset.x-k8s.io")
        found = "installed" if crd else "JobSet is not installed: https://jobset.sigs.k8s.io"
        checks.append(("JobSet", found, bool(crd)))
    except UnansweredError as error:
        checks.append(("cluster", str(error), False))
        return ClusterReport(place, tuple(checks), None)
    with futures.ThreadPoolExecutor(4) as pool:
        may = list(pool.map(lambda asked: _may(cluster, *asked), NEEDED))
    denied = [" ".join(asked) for asked, yes in zip(NEEDED, may, strict=True) if not yes]
    checks.append(("permissions", f"denied: {', '.join(denied)}" if denied else "all", not denied))
    target = None
    try:
        target = find_cluster(place, Path.cwd(), lambda text: None, lambda: False)
        if settings.queue:
            checks.append(("queue", settings.queue, True))
    except PlaceError as error:
        checks.append(("queue", str(error), False))
    return ClusterReport(place, tuple(checks), target)


def _may(cluster: Kubectl, verb: str, what: str) -> bool:
    kind, _, part = what.partition("/")
    extra = [f"--subresource={part}"] if part else []
    try:
        # It says yes or no, and ends with 1 for no.
        return cluster.run("auth", "can-i", verb, kind, *extra).strip() == "yes"
    except UnansweredError:
        return False


def _open_place(run: RunDir, placed: PlacedRun) -> Place:
    assert isinstance(placed, JobSetRun)
    return GkePlace(run, placed)


KIND = Kind(find_cluster, JobSetRun, _open_place, inspect_cluster)
