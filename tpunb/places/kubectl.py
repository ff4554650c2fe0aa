"""Calls `kubectl`: reads the objects of a run, and why its pods do not start.

Credentials are kubectl's own. No decision depends on the wording of its messages: objects are read
as JSON, with their conditions and reasons; messages are only shown to people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tpunb.places.config import JobSetSettings
from tpunb.places.errors import PlaceError, as_place_error
from tpunb.utils import tools
from tpunb.utils.tools import ToolError, ToolProblem

INSTANCE = "app.kubernetes.io/instance"
"""The label of all objects of a run, with the JobSet's name as its value."""
RESTART = "jobset.sigs.k8s.io/restart-attempt"
INDEX = "batch.kubernetes.io/job-completion-index"
JOBSETS, WORKLOADS = "jobsets.jobset.x-k8s.io", "workloads.kueue.x-k8s.io"
QUEUES = "localqueues.kueue.x-k8s.io"
CONTAINER = "tpunb"
_ANSWER = "--request-timeout=20s"
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
class Observed:
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


@contextmanager
def readable(shown: str) -> Iterator[None]:
    """Context manager or decorator: read objects, which may be of another form than expected.

    Raises UnansweredError for those that are.
    """
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise UnansweredError(
            f"the output of `{shown}` is not as expected ({type(error).__name__}: {error})"
        ) from None


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
        try:
            return tools.call(command, shown=f"kubectl {words[0]}", given=given.encode()).output
        except ToolError as error:
            missing = error.problem in (ToolProblem.MISSING, ToolProblem.NOT_STARTED)
            raise (PlaceError if missing else UnansweredError)(str(error)) from None

    def get(self, *words: str) -> dict[str, Any]:
        """Return objects as JSON, {} for a missing single object. Raises UnansweredError."""
        printed = self.run("get", *words, "--ignore-not-found", "-o", "json")
        if not printed.strip():
            return {}
        with as_place_error(UnansweredError):
            found: Mapping[str, Any] = tools.read_json(Mapping[str, Any], printed, "kubectl get")
        return dict(found)

    def items(self, *words: str) -> list[dict[str, Any]]:
        """The objects of a list. Raises UnansweredError."""
        found = self.get(*words)
        listed = found.get("items")
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            said = tools.quote(str(found), 200)
            raise UnansweredError(f"the output of `kubectl get` is not a list of objects: {said}")
        return listed

    @readable("kubectl get")
    def observe(self, name: str) -> Observed:
        """Read the objects of a run. Raises UnansweredError."""
        found = self.items(f"{JOBSETS},pods", "-l", f"{INSTANCE}={name}")
        jobset = next((each for each in found if each.get("kind") == "JobSet"), None)
        pods = [_pod(each) for each in found if each.get("kind") == "Pod"]
        last = max((pod.restart for pod in pods), default=0)
        if jobset is None:
            return Observed(
                False, restarts=last, pods={p.index: p for p in pods if p.restart == last}
            )
        spec, status = jobset.get("spec") or {}, jobset.get("status") or {}
        restarts = int(status.get("restarts") or 0)
        ended = str(status.get("terminalState") or "")
        told = ""
        for condition in status.get("conditions") or []:
            if condition.get("status") == "True" and condition.get("type") in _TERMINAL:
                ended = ended or str(condition["type"])
                told = str(condition.get("message") or "")
        return Observed(
            True,
            uid=str(jobset["metadata"].get("uid") or ""),
            restarts=restarts,
            allowed=int((spec.get("failurePolicy") or {}).get("maxRestarts") or 0),
            ended=ended,
            suspended=bool(spec.get("suspend")),
            told=told,
            pods={pod.index: pod for pod in pods if pod.restart == restarts},
        )

    @readable("kubectl get")
    def why_not_admitted(self, uid: str) -> str:
        """Kueue's messages about a JobSet that waits, for people; '' if there are none."""
        told = []
        for workload in self.items(WORKLOADS, "-l", f"kueue.x-k8s.io/job-uid={uid}"):
            for condition in (workload.get("status") or {}).get("conditions") or []:
                if condition.get("status") == "False" and condition.get("message"):
                    told.append(str(condition["message"]))
        return "; ".join(dict.fromkeys(told))

    @readable("kubectl get")
    def warnings(self, *names: str) -> str:
        """The latest warning about one of these objects, for people; '' if there is none."""
        told = ""
        for each in self.items("events", "--field-selector", "type=Warning"):
            if (each.get("involvedObject") or {}).get("name") in names:
                told = str(each.get("message") or "")
        return told

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
