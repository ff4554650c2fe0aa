"""Runs in a Kubernetes cluster (GKE) as JobSets: the five calls, made with `kubectl`.

1. Create: ConfigMap, Secret and JobSet (`jobset`), with `kubectl create`.
2. Wait, for a limited time: Kueue admits the JobSet, nodes are added, images are pulled. Each step
   is reported by name.
3. Follow: `kubectl exec … tpunb node --follow --linger` in each pod, with the same streams as over
   ssh. After a failure JobSet starts all pods again: their files are appended to the local folder.
4. End: pods linger until everything has been received, then the objects are deleted. Anything not
   received is in the pods' logs, and in the bucket of the run's checkpoints.
"""

from __future__ import annotations

import json
import queue
import secrets
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpunb.machine import prices
from tpunb.places import bucket, kubectl
from tpunb.places.config import JobSetSettings, PlaceConfig
from tpunb.places.errors import PlaceError, as_place_error, list_hosts
from tpunb.places.hosts import POLL_INTERVAL, WAITING, HostsPlace
from tpunb.places.jobset import JobSetRun, JobSetTarget, write_manifest
from tpunb.places.kubectl import CONTAINER, Kubectl, Observed, Pod, UnansweredError
from tpunb.places.place import Cancelled, Check, ConnectionLost, HostLine, Restarted, Say
from tpunb.places.target import Estimate, PlaceKind, PlaceReport
from tpunb.places.transport import Transport
from tpunb.runs import stream
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note, Phase
from tpunb.runs.folder_stream import read_ended
from tpunb.runs.spec import PhaseKind, RunState, StopCause
from tpunb.runs.stream import End, Received
from tpunb.utils import records, tools
from tpunb.utils.errors import TpunbError
from tpunb.utils.text import duration

AGAIN = 2.0
"""Seconds between two queries of the cluster while the run waits for something."""
SELDOM = 20.0
"""Seconds between two queries of the cluster while all pods are followed."""
NO_IMAGE = 60.0
"""Seconds for which pulling an image, or creating a container, may fail."""
UNREACHED = 900.0
"""Seconds without an answer after which the cluster is considered lost."""
LINGER = 120.0
"""Seconds for which pods wait after the end of the run until its files have been received."""
ALONE = 600.0
"""Seconds after which a run that is not detached is stopped if it is not followed."""
TRIES = 20
"""Attempts to follow a running pod without receiving a line from any pod."""
LOGS = 5
"""Attempts to read the log of a pod that has ended."""
ENDING = 60.0
"""Seconds beyond the grace period until pods that do not end are deleted."""


class PodTransport(Transport):
    """Runs commands in the pods of a run with `kubectl exec`."""

    def __init__(self, cluster: Kubectl, names: tuple[str, ...]) -> None:
        self._names = names
        self.pods: dict[int, str] = {}
        """The present pod of each host."""
        self._cluster = cluster

    @property
    def hosts(self) -> tuple[str, ...]:
        return self._names

    def command(self, host: int, remote: str) -> list[str]:
        """The local command that runs `remote`. Raises PlaceError if the host has no pod."""
        if host not in self.pods:
            raise PlaceError(f"{self.hosts[host]} has no pod, or its pod has gone")
        words = ["exec", "-i", self.pods[host], "-c", CONTAINER, "--", "sh", "-c", remote]
        return self._cluster.command(*words)

    def log(self, host: int) -> list[str]:
        """The command that prints the log of a pod."""
        return self._cluster.command("logs", self.pods[host], "-c", CONTAINER)


class GkePlace(HostsPlace):
    """A run in a cluster."""

    placed: JobSetRun

    def __init__(self, run: RunDir, placed: JobSetRun) -> None:
        self._settings = placed.place.settings_as(JobSetSettings)
        self._cluster = Kubectl(self._settings)
        self._pods = PodTransport(self._cluster, placed.hosts)
        super().__init__(run, placed, self._pods)
        self._over = False
        """True if the run has ended and was received: the objects can be deleted."""
        self._told = ""
        """The last message, which is not repeated."""
        self._unread: Counter[int] = Counter()
        """Failed attempts to read the log of an ended pod, by host."""

    # Starting

    def start(self, variables: Mapping[str, str], say: Say, cancelled: Check) -> None:
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
        """Wait until every pod has begun; yield what is waited for whenever that changes.

        Yields '' in between. Raises PlaceError if waiting is useless, or takes too long.
        """
        began, told = time.monotonic(), ""
        broken_since: float | None = None
        unreached: float | None = None
        hosts = len(self.placed.hosts)
        while True:
            try:
                seen = self._cluster.observe(self.placed.name)
                waits = self._describe(seen)
                unreached = None
            except UnansweredError as error:
                unreached = unreached or time.monotonic()
                if time.monotonic() - unreached > UNREACHED:
                    raise
                yield self._once(str(error))
                yield from _pause(AGAIN)
                continue
            if seen.exists:
                self.note_taken()
            if len(begun_pods(seen)) == hosts or seen.restarts > 0:
                return
            if not seen.exists:
                what = (
                    "no longer exists: it was deleted"
                    if self.run.taken.exists()
                    else "does not exist, although `kubectl create` has reported no error"
                )
                raise PlaceError(f"JobSet {self.placed.name} {what}")
            if seen.ended:
                raise PlaceError(f"JobSet {self.placed.name} has ended as {seen.ended}: {waits}")
            reasons = {pod.waits for pod in seen.pods.values()}
            broken = reasons & (kubectl.NO_IMAGE | kubectl.NOT_MADE)
            broken_since = (broken_since or time.monotonic()) if broken else None
            if broken_since is not None and time.monotonic() - broken_since >= NO_IMAGE:
                raise PlaceError(
                    f"{waits}. Check the image, {self._settings.image} (`image` of "
                    f"[places.{self.placed.place.name}])",
                    self.placed.place.file,
                    f"places.{self.placed.place.name}.image",
                )
            if time.monotonic() - began > self._settings.wait:
                raise PlaceError(
                    f"the pods have not started within {duration(self._settings.wait)} (`wait` of "
                    f"[places.{self.placed.place.name}]): {waits}"
                )
            if waits != told:
                told = waits
                yield waits
            yield from _pause(AGAIN)

    def _once(self, text: str) -> str:
        """The text, or '' if it was the last one as well."""
        said, self._told = self._told, text
        return "" if said == text else text

    def _describe(self, seen: Observed) -> str:
        """A phrase for what the run waits for."""
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
            if pod.waits in kubectl.NOT_MADE:
                return f"{host}: its container cannot be created: {pod.told}"
        lacking = [pod for pod in waiting if pod.unscheduled]
        if lacking:
            names = list_hosts([self.placed.hosts[pod.index] for pod in lacking])
            return f"no node for {names} yet: {lacking[0].told}"
        names = list_hosts([self.placed.hosts[pod.index] for pod in waiting])
        return f"pulling the image on the nodes of {names}"

    # Following

    def follow(self, since: Sequence[Mapping[str, int]]) -> Iterator[HostLine | None]:
        hosts = range(len(self.placed.hosts))
        ended: dict[int, HostLine] = {}
        """The last message of hosts whose run has ended; not yielded yet."""
        looked = float("-inf")
        silent: Counter[int] = Counter()
        begun = bool(self._pods.pods)
        unreached: float | None = None
        stopped: float | None = None
        while True:
            now = time.monotonic()
            self._send_heartbeat()
            if self._stops and stopped is None:
                stopped, looked = now, float("-inf")
            followed = all(host in self._connections or host in ended for host in hosts)
            quiet = followed and not ended and stopped is None
            if now - looked >= (SELDOM if quiet else AGAIN):
                try:
                    seen = self._cluster.observe(self.placed.name)
                    unreached = None
                except UnansweredError as error:
                    looked, unreached = now, unreached or now
                    if text := self._once(f"the cluster does not answer: {error}"):
                        self.run.emit(Note(text))
                    if now - unreached > UNREACHED and not followed:
                        self.run.emit(Note(self._left_behind(str(error))))
                        for host in set(hosts) - set(ended):
                            yield HostLine(
                                host, ConnectionLost(f"the cluster does not answer: {error}")
                            )
                        return
                    yield None
                    continue
                looked = time.monotonic()
                if seen.restarts > self.placed.restart:
                    yield from self._switch_pods(seen)
                    ended.clear()
                    continue
                begun = begun or bool(begun_pods(seen))
                if stopped is not None and not begun:
                    self._over = True
                    yield from (HostLine(host, End(1)) for host in hosts)
                    return
                if stopped is not None and now - stopped > self.run.read_spec().grace + ENDING:
                    if left := self._delete():
                        self.run.emit(Note(left))
                    yield from self._gone(ended, "it did not end after a stop, and was deleted")
                    return
                final = yield from self._attend(seen, since, ended)
                if final:
                    return
                waits = not over(seen) and len(begun_pods(seen)) < len(hosts)
                if waits and (told := self._once(self._describe(seen))):
                    self.run.emit(Phase(PhaseKind.STARTING, told))
            try:
                said = self._said.get(timeout=POLL_INTERVAL)
            except queue.Empty:
                yield None
                continue
            if isinstance(said.line, ConnectionLost):
                present = self._connections.get(said.host)
                if present is not None and present.process.returncode is None:
                    continue  # from the host's previous connection
                self._close(said.host)
                silent[said.host] += 1
                if silent[said.host] == TRIES:
                    reason = f"its pod is running, but cannot be followed: {said.line.reason}"
                    ended[said.host] = HostLine(said.host, ConnectionLost(reason, final=True))
                looked = min(
                    looked, time.monotonic() - AGAIN + POLL_INTERVAL
                )  # query soon, but not at once
            elif isinstance(said.line, End):
                ended[said.host] = said
                if len(ended) == len(hosts):
                    if not self._will_restart(ended):
                        self._over = True
                        yield from ended.values()
                        return
                    self._send_all(Received())
            else:
                silent.clear()
                yield said

    def _will_restart(self, ended: Mapping[int, HostLine]) -> bool:
        """True if JobSet will start all pods again."""
        result = records.read_dict(self.run.path / "hosts/0/result.json")
        stop = result.get("stop")
        by_user = isinstance(stop, dict) and stop.get("cause") == StopCause.USER
        if self._stops or by_user or result.get("state") == RunState.TIMED_OUT:
            return False  # the pods have exited with 0
        codes = [said.line.returncode for said in ended.values() if isinstance(said.line, End)]
        return any(codes) and self.placed.restart < self._settings.restarts

    def _switch_pods(self, seen: Observed) -> Iterator[HostLine]:
        """Switch to the new pods after JobSet has started all pods again."""
        for host in list(self._connections):
            self._close(host)
        while not self._said.empty():
            if not isinstance((said := self._said.get()).line, (ConnectionLost, End)):
                yield said
        # Threads that still read from old pods must not add lines to the new queue.
        self._said = queue.Queue(WAITING)
        self._pods.pods.clear()
        self._unread.clear()
        yield HostLine(0, Restarted())
        self.placed = replace(self.placed, restart=seen.restarts)
        self.placed.write(self.run)
        text = f"JobSet has started all pods again (restart {seen.restarts} of {seen.allowed})"
        self.run.emit(Note(text))

    def _attend(
        self, seen: Observed, since: Sequence[Mapping[str, int]], ended: dict[int, HostLine]
    ) -> Generator[HostLine, None, bool]:
        """Connect to pods that are not followed; return True if nothing more can come."""
        later = False
        for host in range(len(self.placed.hosts)):
            if host in self._connections or host in ended:
                continue
            pod = seen.pods.get(host)
            if pod is None or pod.leaving:
                continue
            if pod.phase == "Running":
                self._pods.pods[host] = pod.name
                self._follow_again(host, since[host])
            elif pod.phase in ("Succeeded", "Failed") and self._pods.pods.get(host) != "":
                self._pods.pods[host] = pod.name
                if (yield from self._read_log(host, ended)) or self._unread[host] == LOGS:
                    self._pods.pods[host] = ""  # do not read it again
                else:
                    later = True
        left = [h for h in range(len(self.placed.hosts)) if h not in ended]
        if not left:
            if self._will_restart(ended) and not over(seen):
                return False  # JobSet has not restarted the pods yet
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
        self, ended: Mapping[int, HostLine], why: str, seen: Observed | None = None
    ) -> Iterator[HostLine]:
        """Yield the end of every host, from the bucket if necessary, or why it has none."""
        for host in range(len(self.placed.hosts)):
            if host in ended:
                yield ended[host]
                continue
            pod = None if seen is None else seen.pods.get(host)
            told = f"{why}; {pod.told}" if pod is not None and pod.told else why
            yield from self._from_bucket(host, told)

    def _read_log(self, host: int, ended: dict[int, HostLine]) -> Generator[HostLine, None, bool]:
        """Yield the stream's lines in the log of an ended pod; return False if unreadable."""
        reader = stream.StreamReader(1 << 24)
        try:
            told = self._cluster.run(*self._pods.log(host)[1 + len(self._cluster.flags) :])
        except UnansweredError:
            self._unread[host] += 1
            return False
        for said in reader.feed(told.encode()):
            if isinstance(said, End):
                ended[host] = HostLine(host, said)
            elif not isinstance(said, str):
                yield HostLine(host, said)
        return True

    def _from_bucket(self, host: int, why: str) -> Iterator[HostLine]:
        """Yield the lines of a pod that is gone from the copy of its folder in the bucket."""
        url = self.placed.place.checkpoints(self.run.id)
        if "://" in url:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = bucket.get_files(url, host, ["*"], Path(folder))
                except PlaceError as error:
                    found, why = [], f"{why}; {error}"
                for line in read_ended(RunDir(folder)) if found else ():
                    yield HostLine(host, line)
                    if isinstance(line, End):
                        return
        yield HostLine(host, ConnectionLost(why, final=True))

    def _follow_again(self, host: int, since: Mapping[str, int]) -> None:
        words = ["node", "--run", self.placed.folders[host], "--follow", "--since", "-"]
        command = f"exec tpunb {shlex.join([*words, '--stream', '--linger', f'{LINGER:g}s'])}"
        first = (json.dumps(dict(since)) + "\n").encode()
        self._connect(host, command, first + b"".join(map(stream.encode, self._stops)))

    def release_lifelines(self) -> None:
        """Do nothing: the stop was passed on, and the pods are followed to their end."""

    def fetch(
        self, patterns: Sequence[str], into: Path, hosts: Sequence[int] | None = None
    ) -> list[Path]:
        """Fetch from the pods while they are running, otherwise from the bucket."""
        chosen = range(len(self.placed.hosts)) if hosts is None else hosts
        seen = self._cluster.observe(self.placed.name)
        running = {host: pod.name for host, pod in seen.pods.items() if pod.phase == "Running"}
        if all(host in running for host in chosen):
            self._pods.pods.update(running)
            return super().fetch(patterns, into, hosts)
        url = self.placed.place.checkpoints(self.run.id)
        if "://" not in url:
            raise PlaceError(
                f"the pods of run {self.run.id} are gone, together with their files. For later "
                f"runs, name a URL (gs://…) as `checkpoints` of [places.{self.placed.place.name}]"
            )
        fetched = []
        spec = self.run.read_spec()
        with tempfile.TemporaryDirectory(dir=into) as folder:
            for host in chosen:
                part = Path(folder, str(host))
                for path in bucket.get_files(url, host, patterns, part):
                    name = path.relative_to(part).as_posix()
                    place = stream.fetched_path(name, host, spec.ranks_on(host))
                    if place is None:
                        continue
                    there = into / place
                    there.parent.mkdir(parents=True, exist_ok=True)
                    fetched.append(path.replace(there))
        return fetched

    def state(self) -> RunState | None:
        try:
            seen = self._cluster.observe(self.placed.name)
        except UnansweredError:
            return None
        if seen.exists and any(pod.phase == "Running" for pod in seen.pods.values()):
            return RunState.RUNNING
        return RunState.WAITING if seen.exists and not seen.ended else None

    # Ending

    def close(self) -> None:
        """End every connection; if the run has ended, release the pods and delete its objects."""
        if self._over:
            if self._connections and self.run.read_spec().profile is not None:
                try:  # only the pods have it
                    self.fetch(["profile"], self.run.path)
                except (TpunbError, OSError) as error:
                    self.run.emit(Note(f"the profile could not be fetched: {error}"))
            self._send_all(Received())
            if left := self._delete():
                self.run.emit(Note(left))
        super().close()

    def _delete(self) -> str:
        """Delete the run's objects; return a message for the user if that fails."""
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
        """Message that the run's objects may still exist, and how to delete them."""
        return f"{problem}. {self.placed.leftover}"


def begun_pods(seen: Observed) -> list[Pod]:
    """The pods whose container has begun."""
    return [pod for pod in seen.pods.values() if pod.phase != "Pending"]


def over(seen: Observed) -> bool:
    """True if no pod of the run can still start."""
    return not seen.exists or bool(seen.ended)


def _pause(seconds: float) -> Iterator[str]:
    """Sleep in short pieces, so that the caller can check for a stop."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(POLL_INTERVAL)
        yield ""


# Before a run


def find_cluster(place: PlaceConfig, cwd: Path, say: Say, cancelled: Check) -> JobSetTarget:
    """Query a cluster for its queue and the price of its nodes. Raises PlaceError."""
    settings = place.settings_as(JobSetSettings)
    cluster = Kubectl(settings)
    say(f"querying the cluster of place {place.name}")
    notes = []
    if settings.queue:
        found = cluster.get(kubectl.QUEUES, settings.queue)
        if not found:
            raise PlaceError(
                f"place {place.name}: the cluster has no queue {settings.queue!r} in this "
                "namespace: `kubectl get localqueues` lists them",
                place.file,
                f"places.{place.name}.queue",
            )
        with kubectl.readable("kubectl get localqueues"):
            notes = _describe_queue(cluster, settings, found)
    if cancelled():
        raise Cancelled
    with kubectl.readable("kubectl get nodes"):
        price, unknown = _price(cluster, settings)
    asked = Estimate(price, unknown, notes=tuple(notes), starts=1 + settings.restarts)
    return JobSetTarget(place, asked=asked)


def _describe_queue(
    cluster: Kubectl, settings: JobSetSettings, found: Mapping[str, Any]
) -> list[str]:
    """The length of the queue and the use of its quota, as far as the user may read them."""
    waiting = int((found.get("status") or {}).get("pendingWorkloads") or 0)
    told = f"queue {settings.queue}: {waiting} waiting"
    owner = str((found.get("spec") or {}).get("clusterQueue") or "")
    try:
        queued = cluster.get("clusterqueues.kueue.x-k8s.io", owner) if owner else {}
    except UnansweredError:  # the user may not read it
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
    """The number of google.com/tpu in a list of resources."""
    listed = resources if isinstance(resources, list) else []
    found = [each.get(key) for each in listed if each.get("name") == "google.com/tpu"]
    return sum(int(each) for each in found if str(each).isdecimal())


def _price(cluster: Kubectl, settings: JobSetSettings) -> tuple[Any, str]:
    """The price of an hour of the slice in its nodes' zone; or None, and why it is not known."""
    own = settings.slice
    labels = {
        "cloud.google.com/gke-tpu-accelerator": own.accelerator.label,
        "cloud.google.com/gke-tpu-topology": own.topology,
    }
    chosen = ",".join(f"{name}={value}" for name, value in labels.items())
    try:
        nodes = cluster.items("nodes", "-l", chosen)
    except UnansweredError:
        return None, "you are not allowed to list the cluster's nodes, which have their zone"
    where = {
        (
            str(each["metadata"].get("labels", {}).get("topology.kubernetes.io/zone", "")),
            each["metadata"].get("labels", {}).get("cloud.google.com/gke-spot") == "true",
        )
        for each in nodes
    }
    if len(where) != 1:
        what = "nodes in several zones or at several prices" if where else "no such node now"
        return None, f"the cluster has {what}"
    [(zone, spot)] = where
    found = prices.price(own.accelerator_type, zone, spot)
    unknown = "" if found else f"the price list has no {own.accelerator_type} in {zone}"
    return found, unknown


# tpunb doctor


_OBJECTS = (kubectl.JOBSETS, "configmaps", "secrets")
NEEDED = (
    *(("create", what) for what in _OBJECTS),
    *(("delete", what) for what in _OBJECTS),
    *(("get", what) for what in (kubectl.JOBSETS, "pods", "pods/log", "events")),
    ("create", "pods/exec"),
)
"""Permissions that a run needs: verb and resource of `kubectl auth can-i`."""


def inspect_cluster(place: PlaceConfig) -> PlaceReport:
    """Check whether a run can be started in a cluster, without starting one. Raises PlaceError."""
    checks: list[tuple[str, str, bool]] = []
    """What was checked, what was found, and whether a run is possible with it."""
    target = _check_cluster(place, checks)
    width = max(len(what) for what, _, _ in checks)
    lines = [f"{what.ljust(width)}  {found}" for what, found, good in checks if good]
    ready = ""
    if target is not None:
        own = target.settings.slice
        lines += [f"note: {told}" for told in target.asked.describe(None)]
        ready = f"runs on {own.accelerator_type}, {own.hosts} pods of {own.chips} chips"
    problems = tuple((what, found) for what, found, good in checks if not good)
    details = {"checks": [{"what": w, "found": f, "good": good} for w, f, good in checks]}
    return PlaceReport(place, tuple(lines), problems, details, ready)


def _check_cluster(place: PlaceConfig, checks: list[tuple[str, str, bool]]) -> JobSetTarget | None:
    settings = place.settings_as(JobSetSettings)
    cluster = Kubectl(settings)
    try:
        printed = cluster.run("version", "--client", "-o", "json")
        with as_place_error(), kubectl.readable("kubectl version"):
            client = tools.read_json(Mapping[str, Any], printed, "kubectl version")
            checks.append(("kubectl", str(client["clientVersion"]["gitVersion"]), True))
        context = settings.context or cluster.run("config", "current-context").strip()
        checks.append(("context", context, True))
    except PlaceError as error:
        checks.append(("kubectl", str(error), False))
        return None
    try:
        crd = cluster.get("customresourcedefinitions", "jobsets.jobset.x-k8s.io")
    except UnansweredError as error:
        checks.append(("cluster", str(error), False))
        return None
    found = "installed" if crd else "JobSet is not installed: https://jobset.sigs.k8s.io"
    checks.append(("JobSet", found, bool(crd)))
    with futures.ThreadPoolExecutor(4) as pool:
        may = list(pool.map(lambda asked: _may(cluster, *asked), NEEDED))
    denied = [" ".join(asked) for asked, yes in zip(NEEDED, may, strict=True) if not yes]
    checks.append(("permissions", f"denied: {', '.join(denied)}" if denied else "all", not denied))
    try:
        target = find_cluster(place, Path.cwd(), lambda text: None, lambda: False)
    except PlaceError as error:
        what = "queue" if error.key.endswith(".queue") else "cluster"
        checks.append((what, str(error), False))
        return None
    if settings.queue:
        checks.append(("queue", settings.queue, True))
    return target


def _may(cluster: Kubectl, verb: str, what: str) -> bool:
    kind, _, part = what.partition("/")
    extra = [f"--subresource={part}"] if part else []
    try:
        # It prints yes or no, and exits with 1 for no.
        return cluster.run("auth", "can-i", verb, kind, *extra).strip() == "yes"
    except UnansweredError:
        return False


KIND = PlaceKind(find_cluster, JobSetRun, GkePlace, inspect_cluster)
