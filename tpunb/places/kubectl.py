"""Kubernetes, as `kubectl` shows it: the objects of one run, and why its pods do not begin.

Credentials are kubectl's own. Nothing is decided from the wording of what it prints: objects come
as JSON, with their conditions and reasons, and what is said besides is shown to people.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpunb.places.config import JobSetSettings
from tpunb.places.errors import PlaceError

INSTANCE = "app.kubernetes.io/instance"
"""The label of all objects of a run, with its name."""
RESTART = "jobset.sigs.k8s.io/restart-attempt"
INDEX = "batch.kubernetes.io/job-completion-index"
JOBSETS, WORKLOADS = "jobsets.jobset.x-k8s.io", "workloads.kueue.x-k8s.io"
QUEUES = "localqueues.kueue.x-k8s.io"
CONTAINER = "tpunb"
PATIENCE = 60.0
"""Seconds that a call may take."""
_ANSWER = "--request-timeout=20s"
_TAIL = 1000
NO_IMAGE = frozenset(["ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"])
NOT_MADE = frozenset(["CreateContainerConfigError", "CreateContainerError", "RunContainerError"])
"""Reasons for which a container waits and may wait for ever, as the kubelet names them."""


class UnansweredError(PlaceError):
    """The cluster has not done what was asked; it may, later."""


@dataclass(frozen=True)
class Pod:
    """One host of a run."""

    name: str
    index: int
    restart: int
    """How often JobSet had started all pods again when it made this one."""
    phase: str
    """'Pending', 'Running', 'Succeeded', 'Failed', 'Unknown'."""
    waits: str = ""
    """The reason for which its container waits, as the kubelet names it."""
    unscheduled: bool = False
    """No node has been found for it."""
    told: str = ""
    """What is said of why it waits, or has ended, for people."""
    leaving: bool = False
    """It is being deleted."""


@dataclass(frozen=True)
class Seen:
    """The objects of a run, at one moment."""

    exists: bool
    """Whether its JobSet does."""
    uid: str = ""
    restarts: int = 0
    """How often JobSet has started all pods again."""
    allowed: int = 0
    """How often it does so at most."""
    ended: str = ""
    """'Completed' or 'Failed', once the JobSet has ended."""
    suspended: bool = False
    """Kueue has not admitted it yet."""
    told: str = ""
    """Why it has failed, for people."""
    pods: Mapping[int, Pod] = field(default_factory=dict)
    """Those of the last start, by index."""


class Kubectl:
    """Calls of `kubectl` with the context and the namespace of a place."""

    def __init__(self, settings: JobSetSettings) -> None:
        self._settings = settings
        self.flags = [
            *([f"--context={settings.context}"] if settings.context else []),
            *([f"--namespace={settings.namespace}"] if settings.namespace else []),
        ]

    def run(self, *words: str, given: str = "") -> str:
        """What a call prints. Raises UnansweredError, PlaceError where there is no kubectl."""
        command = ["kubectl", *self.flags, _ANSWER, *words]
        shown = f"`kubectl {words[0]}`"
        try:
            # Not as the locale has it: scripts are UTF-8, and logs have whatever was printed.
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
                "there is no `kubectl` here: https://kubernetes.io/docs/tasks/tools/"
            ) from None
        except subprocess.TimeoutExpired:
            raise UnansweredError(f"{shown} has not answered in {PATIENCE:g} s") from None
        if done.returncode:
            raise UnansweredError(f"{shown} failed: {done.stderr.strip()[-_TAIL:]}")
        return done.stdout

    def get(self, *words: str) -> dict[str, Any]:
        """Objects, as JSON; {} where a single one is not there. Raises UnansweredError."""
        told = self.run("get", *words, "--ignore-not-found", "-o", "json")
        try:
            found = json.loads(told) if told.strip() else {}
        except ValueError:
            raise UnansweredError(f"`kubectl get` has said no JSON: {told[:200]!r}") from None
        return found if isinstance(found, dict) else {}

    def items(self, *words: str) -> list[dict[str, Any]]:
        """The objects of a list. Raises UnansweredError."""
        return list(self.get(*words).get("items") or [])

    def look(self, name: str) -> Seen:
        """The objects of a run. Raises UnansweredError."""
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
        """What Kueue says of a JobSet that waits, for people; '' if nothing."""
        told = []
        for workload in self.items(WORKLOADS, "-l", f"kueue.x-k8s.io/job-uid={uid}"):
            for condition in (workload.get("status") or {}).get("conditions") or []:
                if condition.get("status") == "False" and condition.get("message"):
                    told.append(str(condition["message"]))
        return "; ".join(dict.fromkeys(told))

    def warnings(self, *names: str) -> str:
        """The last warning about one of these objects, for people; '' if there is none."""
        events = [
            each
            for each in self.items("events", "--field-selector", "type=Warning")
            if (each.get("involvedObject") or {}).get("name") in names
        ]
        return str(events[-1].get("message") or "") if events else ""

    def create(self, manifest: str) -> None:
        """Make objects. Raises UnansweredError: then some of them may be there."""
        self.run("create", "-f", "-", given=manifest)

    def delete(self, name: str) -> None:
        """Delete the objects of a run, as far as they are there. Raises UnansweredError."""
        kinds = f"{JOBSETS},configmaps,secrets"
        self.run("delete", kinds, "-l", f"{INSTANCE}={name}", "--ignore-not-found", "--wait=false")

    def command(self, *words: str) -> list[str]:
        """A call that goes on, as `exec` and `logs`."""
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


def describe_waiting(names: Sequence[str]) -> str:
    """'node-0', 'node-0 and 3 more'."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
