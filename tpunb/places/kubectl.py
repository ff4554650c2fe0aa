"""Calls `kubectl`: reads the objects of a run, and why its pods do not start.

Credentials are kubectl's own. No decision depends on the wording of its messages: objects are read
as JSON, with their conditions and reasons; messages are only shown to people.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpunb.places.config import JobSetSettings
from tpunb.places.errors import PlaceError

INSTANCE = "app.kubernetes.io/instance"
"""The label of all objects of a run, with the JobSet's name as its value."""
RESTART = "jobset.sigs.k8s.io/restart-attempt"
INDEX = "batch.kubernetes.io/job-completion-index"
JOBSETS, WORKLOADS = "jobsets.jobset.x-k8s.io", "workloads.kueue.x-k8s.io"
QUEUES = "localqueues.kueue.x-k8s.io"
CONTAINER = "tpunb"
PATIENCE = 60.0
"""Time-out of a call in seconds."""
_ANSWER = "--request-timeout=20s"
_TAIL = 1000
NO_IMAGE = frozenset(["ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"])
NOT_MADE = frozenset(["CreateContainerConfigError", "CreateContainerError", "RunContainerError"])
"""The kubelet's reasons for containers that wait, and may wait for ever."""


class UnansweredError(PlaceError):
    """A call has failed or was not answered; it may succeed later."""


@dataclass(frozen=True)
class Pod:
    """A pod: one host of a run."""

    name: str
    index: int
    restart: int
    """Number of JobSet's restarts of all pods before it created this pod."""
    phase: str
    """'Pending', 'Running', 'Succeeded', 'Failed', 'Unknown'."""
    waits: str = ""
    """The kubelet's reason why its container waits."""
    unscheduled: bool = False
    """True if no node has been found for it."""
    told: str = ""
    """Messages about why it waits, or has ended, for people."""
    leaving: bool = False
    """True if it is being deleted."""


@dataclass(frozen=True)
class Seen:
    """The objects of a run, at one moment."""

    exists: bool
    """True if the JobSet exists."""
    uid: str = ""
    restarts: int = 0
    """Number of JobSet's restarts of all pods so far."""
    allowed: int = 0
    """Most restarts."""
    ended: str = ""
    """'Completed' or 'Failed', once the JobSet has ended."""
    suspended: bool = False
    """True if Kueue has not admitted it yet."""
    told: str = ""
    """Message about why it has failed, for people."""
    pods: Mapping[int, Pod] = field(default_factory=dict)
    """Pods of the last start, keyed by index."""


class Kubectl:
    """Calls of `kubectl` with the context and the namespace of a place."""

    def __init__(self, settings: JobSetSettings) -> None:
        self._settings = settings
        self.flags = [
            *([f"--context={settings.context}"] if settings.context else []),
            *([f"--namespace={settings.namespace}"] if settings.namespace else []),
        ]

    def run(self, *words: str, given: str = "") -> str:
        """Return a call's output. Raises UnansweredError, or PlaceError without kubectl."""
        command = ["kubectl", *self.flags, _ANSWER, *words]
        shown = f"`kubectl {words[0]}`"
        try:
            # Not in the locale's encoding: scripts are UTF-8, and logs may contain any bytes.
            done = subprocess.run(
                command,
                input=given,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=PATIENCE,
            )
        except FileNotFoundError:
            raise PlaceError(
                "`kubectl` is not installed: https://kubernetes.io/docs/tasks/tools/"
            ) from None
        except subprocess.TimeoutExpired:
            raise UnansweredError(f"{shown} has not answered in {PATIENCE:g} s") from None
        if done.returncode:
            raise UnansweredError(f"{shown} failed: {done.stderr.strip()[-_TAIL:]}")
        return done.stdout

    def get(self, *words: str) -> dict[str, Any]:
        """Return objects as JSON, {} for a missing single object. Raises UnansweredError."""
        printed = self.run("get", *words, "--ignore-not-found", "-o", "json")
        try:
            found = json.loads(printed) if printed.strip() else {}
        except ValueError:
            raise UnansweredError(
                f"the output of `kubectl get` is not JSON: {printed[:200]!r}"
            ) from None
        return found if isinstance(found, dict) else {}

    def items(self, *words: str) -> list[dict[str, Any]]:
        """The objects of a list. Raises UnansweredError."""
        return list(self.get(*words).get("items") or [])

    def look(self, name: str) -> Seen:
        """Read the objects of a run. Raises UnansweredError."""
        found = self.items(f"{JOBSETS},pods", "-l", f"{INSTANCE}={name}")
        jobset = next((each for each in found if each.get("kind") == "JobSet"), None)
        pods = [_pod(each) for each in found if each.get("kind") == "Pod"]
        last = max((pod.restart for pod in pods), default=0)
        if jobset is None:
            return Seen(False, restarts=last, pods={p.index: p for p in pods if p.restart == last})
        spec, status = jobset.get("spec") or {}, jobset.get("status") or {}
        restarts = int(status.get("restarts") or 0)
        ended = str(status.get("terminalState") or "")
        told = ""
        for condition in status.get("conditions") or []:
            if condition.get("status") == "True" and condition.get("type") in _TERMINAL:
                ended = ended or str(condition["type"])
                told = str(condition.get("message") or "")
        return Seen(
            True,
            uid=str(jobset["metadata"].get("uid") or ""),
            restarts=restarts,
            allowed=int((spec.get("failurePolicy") or {}).get("maxRestarts") or 0),
            ended=ended,
            suspended=bool(spec.get("suspend")),
            told=told,
            pods={pod.index: pod for pod in pods if pod.restart == restarts},
        )

    def why_not_admitted(self, uid: str) -> str:
        """Kueue's messages about a JobSet that waits, for people; '' if there are none."""
        told = []
        for workload in self.items(WORKLOADS, "-l", f"kueue.x-k8s.io/job-uid={uid}"):
            for condition in (workload.get("status") or {}).get("conditions") or []:
                if condition.get("status") == "False" and condition.get("message"):
                    told.append(str(condition["message"]))
        return "; ".join(dict.fromkeys(told))

    def warnings(self, *names: str) -> str:
        """The latest warning about one of these objects, for people; '' if there is none."""
        events = [
            each
            for each in self.items("events", "--field-selector", "type=Warning")
            if (each.get("involvedObject") or {}).get("name") in names
        ]
        return str(events[-1].get("message") or "") if events else ""

    def create(self, manifest: str) -> None:
        """Create objects. Raises UnansweredError: some of them may then exist."""
        self.run("create", "-f", "-", given=manifest)

    def delete(self, name: str) -> None:
        """Delete the objects of a run that exist. Raises UnansweredError."""
        kinds = f"{JOBSETS},configmaps,secrets"
        self.run("delete", kinds, "-l", f"{INSTANCE}={name}", "--ignore-not-found", "--wait=false")

    def command(self, *words: str) -> list[str]:
        """The command line of a long call, such as `exec` and `logs`."""
        return ["kubectl", *self.flags, *words]


_TERMINAL = ("Completed", "Failed")


def _pod(data: Mapping[str, Any]) -> Pod:
    metadata, status = data["metadata"], data.get("status") or {}
    labels = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
    waits, told = "", [str(status[key]) for key in ("reason", "message") if status.get(key)]
    for container in status.get("containerStatuses") or []:
        state = container.get("state") or {}
        if waiting := state.get("waiting"):
            waits = str(waiting.get("reason") or "")
            told.append(f"{waits}: {waiting['message']}" if waiting.get("message") else waits)
        if ended := state.get("terminated"):
            told.append(f"{ended.get('reason') or 'ended'}, exit code {ended.get('exitCode')}")
    unscheduled = False
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            unscheduled = True
            told.append(str(condition.get("message") or condition.get("reason") or ""))
    return Pod(
        str(metadata["name"]),
        _number(labels.get(INDEX)),
        _number(labels.get(RESTART)),
        str(status.get("phase") or "Unknown"),
        waits,
        unscheduled,
        "; ".join(told),
        bool(metadata.get("deletionTimestamp")),
    )


def _number(text: object) -> int:
    return int(text) if isinstance(text, str) and text.isdecimal() else 0
