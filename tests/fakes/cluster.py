"""A cluster with TPUs, for `tests/fakes/kubectl`: JobSet, Kueue and pods that are processes here.

    with Cluster(folder) as cluster:
        os.environ.update(cluster.environment())

Pods run their container's command with its arguments, variables and mounted files, in a folder of
their own; their addresses are all this machine's, and no TPU is there, so the spec that a pod
mounts says CPU. JobSet (v0.12) starts all pods again after a failure, as long as `maxRestarts`
allows; Kueue's Workload is not admitted while `quota` has no room. A test sets what goes wrong.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

import tests.fakes

FAKES = Path(next(iter(tests.fakes.__path__)))
ROOT = FAKES.parents[1]
LOOK = 0.05
RESTART = "jobset.sigs.k8s.io/restart-attempt"
INDEX = "batch.kubernetes.io/job-completion-index"
QUEUE = "kueue.x-k8s.io/queue-name"
PLURALS = {
    "jobsets.jobset.x-k8s.io": "JobSet",
    "jobset": "JobSet",
    "pods": "Pod",
    "configmaps": "ConfigMap",
    "configmap": "ConfigMap",
    "secrets": "Secret",
    "secret": "Secret",
    "events": "Event",
    "nodes": "Node",
    "workloads.kueue.x-k8s.io": "Workload",
    "localqueues.kueue.x-k8s.io": "LocalQueue",
    "clusterqueues.kueue.x-k8s.io": "ClusterQueue",
    "customresourcedefinitions": "CustomResourceDefinition",
}
Object = dict[str, Any]
TORCHLESS = ("-m", "tests.fakes.torchless")


class RunningPod:
    """A pod's process and its folder."""

    def __init__(self, made: Object, folder: Path) -> None:
        self.object = made
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}
        self.execs: set[int] = set()
        self.deleted: float | None = None
        """When it was to end at the latest."""

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def log(self) -> Path:
        return self.folder / "log"


class Cluster:
    """The API server, its controllers and its nodes."""

    def __init__(self, folder: Path, *, tpunb: Sequence[str] = TORCHLESS) -> None:
        """`tpunb`: what Python runs as `tpunb` in the containers."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._objects: dict[tuple[str, str], Object] = {}
        self._pods: dict[str, RunningPod] = {}
        self._closing = threading.Event()
        self.unreachable = False
        self.denied: set[str] = set()
        """'create secrets': what the user may not do."""
        self.images: set[str] | None = None
        """Those that can be pulled; None: all."""
        self.nodes = True
        """Whether there are nodes for the pods."""
        self.quota: int | None = None
        """Chips of the queue; None: as many as are asked for."""
        self.used = 0
        """How many of them others use."""
        self._bin = folder / "bin"
        self._bin.mkdir()
        (self._bin / "kubectl").symlink_to(FAKES / "kubectl")
        inside = folder / "inside"
        inside.mkdir()
        words = " ".join(tpunb)
        (inside / "tpunb").write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (inside / "tpunb").chmod(0o755)
        python = str(Path(sys.executable).parent)
        self._path = os.pathsep.join([str(inside), python, "/usr/bin", "/bin"])
        self._put("CustomResourceDefinition", "jobsets.jobset.x-k8s.io", {})

    # For tests

    def environment(self) -> dict[str, str]:
        """Variables with which the stand-in is found."""
        path = f"{self._bin}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "TPUNB_FAKE_CLUSTER": str(self.folder)}

    def set_queue(self, name: str, quota: int | None = None, used: int = 0) -> None:
        """A LocalQueue of a ClusterQueue with so many chips."""
        with self._lock:
            self.quota, self.used = quota, used
            tpu = "google.com/tpu"
            flavors = [{"name": "v6e", "resources": [{"name": tpu, "nominalQuota": quota or 64}]}]
            usage = [{"name": "v6e", "resources": [{"name": tpu, "total": str(used)}]}]
            self._put("LocalQueue", name, {"clusterQueue": "all"}, {"pendingWorkloads": 2})
            groups = {"resourceGroups": [{"coveredResources": [tpu], "flavors": flavors}]}
            self._put("ClusterQueue", "all", groups, {"flavorsUsage": usage})

    def add_node(self, accelerator: str, topology: str, zone: str) -> None:
        """A node of the TPUs' pool."""
        labels = {
            "cloud.google.com/gke-tpu-accelerator": accelerator,
            "cloud.google.com/gke-tpu-topology": topology,
            "topology.kubernetes.io/zone": zone,
        }
        node = self._put("Node", f"node-{uuid.uuid4().hex[:6]}", {})
        node["metadata"]["labels"] = labels

    def objects(self, kind: str) -> list[Object]:
        """Those of a kind."""
        with self._lock:
            return [each for (its, _), each in self._objects.items() if its == kind]

    def pods(self) -> list[RunningPod]:
        with self._lock:
            return list(self._pods.values())

    def calls(self) -> list[list[str]]:
        """What kubectl was called with, so far."""
        log = self.folder / "calls.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def evict(self, index: int) -> None:
        """The node of a pod is drained: its first process is told to end."""
        pod = next(p for p in self.pods() if _index(p.object) == index)
        assert pod.process is not None
        pod.process.terminate()

    def cut(self) -> None:
        """All connections to pods end; what they have started there goes on until it notices."""
        for pod in self.pods():
            for pid in pod.execs:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def left(self, folder: Path | None = None) -> list[int]:
        """Processes of all pods, or of the one in a folder."""
        mark = f"\0HOME={folder or self.folder / 'pods'}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def __enter__(self) -> Cluster:
        cluster = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                request = json.loads(self.rfile.readline())
                if not cluster.unreachable:
                    with cluster._lock:
                        answer = cluster._answer(request)
                    self.wfile.write(json.dumps(answer).encode() + b"\n")

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True

        self._server = Server(str(self.folder / "socket"), Handler)
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=[LOOK]),
            threading.Thread(target=self._control),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()
        for pod in self.pods():
            self._kill(pod)
            if pod.process is not None:
                pod.process.wait()

    # The API server

    def _put(self, kind: str, name: str, spec: Object, status: Object | None = None) -> Object:
        made = {
            "kind": kind,
            "metadata": {"name": name, "uid": str(uuid.uuid4()), "labels": {}, "annotations": {}},
            "spec": spec,
            "status": status or {},
        }
        with self._lock:
            self._objects[kind, name] = made
        return made

    def _answer(self, request: Object) -> Object:
        match request["verb"]:
            case "create":
                return self._create(request["text"])
            case "get":
                return self._get(request)
            case "delete":
                return self._delete(request)
            case "auth":
                verb, what = request["may"]
                part = f"/{request['subresource']}" if request["subresource"] else ""
                denied = f"{verb} {what}{part}" in self.denied
                return {"out": "no\n", "code": 1} if denied else {"out": "yes\n"}
            case "logs":
                pod = self._pods.get(request["pod"])
                if pod is None:
                    return _missing("pods", request["pod"])
                return {"out": pod.log.read_text() if pod.log.exists() else ""}
            case "exec":
                pod = self._pods.get(request["pod"])
                if pod is None:
                    return _missing("pods", request["pod"])
                if pod.process is None or pod.process.poll() is not None:
                    return _error("BadRequest", 'container not found ("tpunb")')
                return {"folder": str(pod.folder / "work"), "environment": pod.environment}
            case "joined":
                pod = self._pods.get(request["pod"])
                if pod is None or pod.process is None or pod.process.poll() is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(request["pid"], signal.SIGKILL)
                else:
                    pod.execs.add(request["pid"])
                return {}
        raise AssertionError(request)

    def _create(self, text: str) -> Object:
        said = []
        for made in yaml.safe_load_all(text):
            kind, name = made["kind"], made["metadata"]["name"]
            plural = next(key for key, its in PLURALS.items() if its == kind)
            if f"create {plural}" in self.denied:
                return _error("Forbidden", f"{plural} is forbidden: User cannot create resource")
            if (kind, name) in self._objects:
                return _error("AlreadyExists", f'{plural} "{name}" already exists')
            made["metadata"].setdefault("annotations", {})
            made["metadata"].setdefault("labels", {})
            made["metadata"]["uid"] = str(uuid.uuid4())
            made["status"] = {}
            self._objects[kind, name] = made
            if kind == "JobSet" and QUEUE in made["metadata"]["labels"]:
                made["spec"]["suspend"] = True  # Kueue's webhook
            said.append(f"{kind.lower()}/{name} created\n")
        return {"out": "".join(said)}

    def _chosen(self, request: Object) -> list[Object]:
        kinds = [PLURALS[word] for word in request["what"][0].split(",")]
        names = request["what"][1:]
        found = []
        for (kind, name), each in self._objects.items():
            labels = each["metadata"].get("labels") or {}
            wanted = dict(
                part.split("=", 1) for part in (request["selector"] or "").split(",") if part
            )
            if kind not in kinds or (names and name not in names):
                continue
            if all(labels.get(key) == value for key, value in wanted.items()):
                found.append(each)
        return found

    def _get(self, request: Object) -> Object:
        word = request["what"][0]
        if f"get {word}" in self.denied:
            return _error("Forbidden", f"{word} is forbidden: User cannot list resource")
        found = self._chosen(request)
        if len(request["what"]) > 1:
            if not found and not request["ignore_not_found"]:
                return _missing(word, request["what"][1])
            return {"out": json.dumps(found[0]) if found else ""}
        return {"out": json.dumps({"kind": "List", "items": found})}

    def _delete(self, request: Object) -> Object:
        for each in self._chosen(request):
            del self._objects[each["kind"], each["metadata"]["name"]]
        return {"out": ""}

    # Controllers and nodes

    def _control(self) -> None:
        while not self._closing.wait(LOOK):
            with self._lock:
                for jobset in self.objects("JobSet"):
                    self._admit(jobset)
                    if not jobset["spec"].get("suspend"):
                        self._reconcile(jobset)
                for pod in list(self._pods.values()):
                    self._watch(pod)

    def _admit(self, jobset: Object) -> None:
        """Kueue: a Workload for each JobSet with a queue; suspended until there is room."""
        if QUEUE not in jobset["metadata"]["labels"]:
            return
        name = f"jobset-{jobset['metadata']['name']}"
        workload = self._objects.get(("Workload", name)) or self._put("Workload", name, {})
        workload["metadata"]["labels"] = {"kueue.x-k8s.io/job-uid": jobset["metadata"]["uid"]}
        room = self.quota is None or _chips(jobset) <= self.quota - self.used
        told = (
            ""
            if room
            else "couldn't assign flavors to pod set node: insufficient unused quota for "
            f"google.com/tpu in flavor v6e, {_chips(jobset) - (self.quota or 0) + self.used} more "
            "needed"
        )
        workload["status"] = {
            "conditions": [
                {"type": "QuotaReserved", "status": str(room), "reason": "Pending", "message": told}
            ]
        }
        if room:
            jobset["spec"]["suspend"] = False

    def _reconcile(self, jobset: Object) -> None:
        status, name = jobset["status"], jobset["metadata"]["name"]
        if status.get("terminalState"):
            return
        restart = status.setdefault("restarts", 0)
        pods = [pod for pod in self._pods.values() if pod.name.startswith(f"{name}-node-0-")]
        if any(_restart(pod.object) < restart for pod in pods):
            return  # they are being deleted
        phases = [pod.object["status"]["phase"] for pod in pods]
        [replicated] = jobset["spec"]["replicatedJobs"]
        job = replicated["template"]["spec"]
        if "Failed" in phases:
            if restart < jobset["spec"]["failurePolicy"]["maxRestarts"]:
                status["restarts"] = restart + 1
                for pod in pods:
                    self._end(pod)
            else:
                told = "jobset failed due to one or more job failures"
                _conclude(jobset, "Failed", told)
        elif len(phases) == job["completions"] and set(phases) == {"Succeeded"}:
            _conclude(jobset, "Completed", "jobset completed successfully")
        elif not pods:
            for index in range(job["completions"]):
                self._make_pod(jobset, job, index, restart)

    def _make_pod(self, jobset: Object, job: Object, index: int, restart: int) -> None:
        name = f"{jobset['metadata']['name']}-node-0-{index}-{uuid.uuid4().hex[:5]}"
        template = job["template"]
        made = self._put("Pod", name, template["spec"], {"phase": "Pending"})
        labels = dict((template.get("metadata") or {}).get("labels") or {})
        made["metadata"]["labels"] = {**labels, RESTART: str(restart), INDEX: str(index)}
        made["owner"] = jobset["metadata"]["name"]
        self._pods[name] = RunningPod(made, self.folder / "pods" / name)

    def _watch(self, pod: RunningPod) -> None:
        status, owner = pod.object["status"], ("JobSet", pod.object["owner"])
        if pod.deleted is None and owner not in self._objects:
            self._end(pod)
        if pod.process is None:
            if pod.deleted is not None:
                self._forget(pod)
                return
            if not self.nodes:
                status["conditions"] = [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes are available: 3 Insufficient google.com/tpu.",
                    }
                ]
                return
            status["conditions"] = [{"type": "PodScheduled", "status": "True"}]
            [container] = pod.object["spec"]["containers"]
            if self.images is not None and container["image"] not in self.images:
                told = f'Back-off pulling image "{container["image"]}"'
                waiting = {"reason": "ImagePullBackOff", "message": told}
                status["containerStatuses"] = [{"name": "tpunb", "state": {"waiting": waiting}}]
                return
            self._run(pod, container)
            status["phase"] = "Running"
            status["containerStatuses"] = [{"name": "tpunb", "state": {"running": {}}}]
            return
        if pod.deleted is not None and time.monotonic() > pod.deleted:
            self._kill(pod)
        code = pod.process.poll()
        if code is not None and status["phase"] == "Running":
            self._kill(pod)
            status["phase"] = "Failed" if code else "Succeeded"
            shown = code if code >= 0 else 128 - code
            reason = "Error" if code else "Completed"
            ended = {"reason": reason, "exitCode": shown}
            status["containerStatuses"] = [{"name": "tpunb", "state": {"terminated": ended}}]
        if code is not None and pod.deleted is not None:
            self._forget(pod)

    def _run(self, pod: RunningPod, container: Object) -> None:
        work = pod.folder / "work"
        work.mkdir(parents=True)
        words = " ".join([*container["command"], *container["args"]])
        for mount in container["volumeMounts"]:
            if mount["mountPath"] in words:
                there = pod.folder / mount["name"]
                self._mount(pod.object, mount["name"], there)
                words = words.replace(mount["mountPath"], str(there))
        owner = pod.object["owner"]
        words = words.replace("$(POD_IP)", "127.0.0.1")
        words = words.replace(f"{owner}-node-0-0.{owner}:", "127.0.0.1:")
        pod.environment = {
            "PATH": self._path,
            "PYTHONPATH": str(ROOT),
            "HOME": str(pod.folder),
            "JOB_COMPLETION_INDEX": str(_index(pod.object)),
            "GCE_METADATA_HOST": "127.0.0.1:1",
        }
        with pod.log.open("wb") as log:
            pod.process = subprocess.Popen(
                words.split(),
                cwd=work,
                env=pod.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _mount(self, pod: Object, name: str, folder: Path) -> None:
        [volume] = (each for each in pod["spec"]["volumes"] if each["name"] == name)
        sources = volume.get("projected", {}).get("sources") or [{"secret": volume["secret"]}]
        folder.mkdir()
        for source in sources:
            [(kind, what)] = source.items()
            owner = what.get("name", what.get("secretName"))
            made = self._objects["ConfigMap" if kind == "configMap" else "Secret", owner]
            values = {
                k: v.encode() for k, v in made.get("data", made.get("stringData", {})).items()
            }
            values |= {k: base64.b64decode(v) for k, v in made.get("binaryData", {}).items()}
            items = what.get("items") or [{"key": key, "path": key} for key in values]
            for item in items:
                data = values[item["key"]]
                if item["path"] == "spec.json":
                    data = json.dumps({**json.loads(data), "device": "CPU"}).encode()
                (folder / item["path"]).write_bytes(data)

    def _end(self, pod: RunningPod) -> None:
        """Delete a pod: SIGTERM, and SIGKILL after its grace period."""
        grace = pod.object["spec"].get("terminationGracePeriodSeconds", 30)
        pod.deleted = time.monotonic() + grace
        pod.object["metadata"]["deletionTimestamp"] = "2026-11-23T00:00:00Z"
        if pod.process is not None and pod.process.poll() is None:
            pod.process.terminate()

    def _forget(self, pod: RunningPod) -> None:
        self._kill(pod)
        self._pods.pop(pod.name, None)
        self._objects.pop(("Pod", pod.name), None)

    def _kill(self, pod: RunningPod) -> None:
        """Everything that is in a pod ends with its first process."""
        if pod.process is not None and pod.process.poll() is None:
            pod.process.kill()
            pod.process.wait()
        for pid in self.left(pod.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _conclude(jobset: Object, state: str, message: str) -> None:
    jobset["status"] |= {
        "terminalState": state,
        "conditions": [{"type": state, "status": "True", "message": message}],
    }


def _chips(jobset: Object) -> int:
    [replicated] = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    limits = job["template"]["spec"]["containers"][0]["resources"]["limits"]
    return int(job["completions"]) * int(limits["google.com/tpu"])


def _index(pod: Object) -> int:
    return int(pod["metadata"]["labels"][INDEX])


def _restart(pod: Object) -> int:
    return int(pod["metadata"]["labels"][RESTART])


def _error(reason: str, text: str) -> Object:
    return {"error": text, "reason": reason}


def _missing(plural: str, name: str) -> Object:
    return _error("NotFound", f'{plural} "{name}" not found')
