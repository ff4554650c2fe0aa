"""Runs on Kaggle: each one is a private notebook (`kaggle_notebook`), run by its session.

The stream comes from the session's log (`log_stream`), which Kaggle's load balancer cuts when it is
idle, and then repeats from the start. Files are available once the session has ended. Kaggle has no
way to end a session from outside, so every run outlives the kernel and cannot be stopped.
"""

from __future__ import annotations

import fnmatch
import hashlib
import queue
import re
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tpunb import data
from tpunb.machine.machine import Machine
from tpunb.places import kaggle_notebook, kaggle_service
from tpunb.places.config import KaggleSettings, PlaceConfig
from tpunb.places.errors import PlaceError
from tpunb.places.kaggle_service import KaggleService, NoAnswerError, Quota, Status
from tpunb.places.kaggle_session import EARLIER, FOLDER
from tpunb.places.log_stream import Unpacker
from tpunb.places.place import Cancelled, ConnectionLost, Place, PlacedRun, Said
from tpunb.places.target import Estimate, Kind, Target
from tpunb.places.transfer import chosen_files
from tpunb.runs import stream
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note, Phase
from tpunb.runs.spec import Device, PhaseKind, Price, RunState, Stop, StopCause
from tpunb.runs.stream import Append, End, Line, Replace
from tpunb.utils import env_vars, records, secrets
from tpunb.utils.errors import TpunbError
from tpunb.utils.text import duration, size

HOST = "kaggle"
"""Host name of the session's machine."""
CHIPS = {"TpuV5E8": 8}
"""Chips of Kaggle's machine shapes with TPUs, keyed by its client's names (--accelerator)."""
POLL_INTERVAL = 0.1
"""Seconds that the follower waits for new output of the log."""
ASK = 10.0
"""Seconds between two queries of the session's state."""
SILENT = 300.0
"""Seconds without output after which the log is requested again: the load balancer cuts idle
connections after about three minutes, which is not always noticed on this side."""
LOST = 1800.0
"""Seconds without an answer from Kaggle after which the run is not followed any more; `tpunb
attach` follows it again."""
AGAIN = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before the log is requested again, by number of vain requests."""
LATE = 120.0
"""Seconds for which the log of an ended session may still be missing: Kaggle stores it first."""
OUTPUT = 180.0
"""Seconds after the end of the run in which Kaggle should report its session as ended."""
UNKNOWN = 3
"""Consecutive answers that a notebook does not exist before it is considered gone."""
STARTS = 120.0
"""Seconds after which a notebook that Kaggle does not know is considered not pushed."""
MOST_SOURCE = 1 << 20
"""Most bytes of a notebook that Kaggle accepts."""
OUTPUTS = "outputs"
"""Folder in the local run folder for the files that the run left in its working directory."""
_TITLE = 50
"""Most characters of a title; the least are five."""
_SOURCES = ("dataset", "competition", "model", "kernel")
_STATES = {
    "QUEUED": RunState.WAITING,
    "NEW_SCRIPT": RunState.WAITING,
    "COMPLETE": RunState.SUCCEEDED,
    "ERROR": RunState.FAILED,
    "CANCEL_ACKNOWLEDGED": RunState.INTERRUPTED,
}
"""States of a session, keyed by the names of Kaggle's KernelWorkerStatus; RUNNING for others."""
_DATA = re.compile(r"^[ \t]*%tpu_data[ \t]+(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class KaggleRun(PlacedRun):
    """Where a run on Kaggle was sent."""

    ref: str
    """'owner/slug' of its notebook."""
    root: str
    """The local folder from which files are copied."""
    left: float | None = None
    """Hours left of the week's quota before the run."""

    @property
    def url(self) -> str:
        """URL of the notebook's page."""
        return f"https://www.kaggle.com/code/{self.ref}"

    @property
    def cannot_stop(self) -> str:
        settings = self.place.settings_as(KaggleSettings)
        return (
            "Kaggle has no way to stop a session from outside, so it continues to use quota. Stop "
            f"it on its page, {self.url} (Cancel Run); otherwise its time-out ends it "
            f"{settings.session_hours:g} h after its start"
        )


@dataclass(frozen=True)
class KaggleTarget(Target):
    """A future session on Kaggle."""

    config: PlaceConfig
    owner: str
    quota: Quota | None
    root: Path

    @property
    def place(self) -> PlaceConfig:
        return self.config

    @property
    def settings(self) -> KaggleSettings:
        """The place's settings, of its kind's type."""
        return self.config.settings_as(KaggleSettings)

    @property
    def hosts(self) -> tuple[str, ...]:
        return (HOST,)

    @property
    def device(self) -> Device:
        return "TPU" if self.settings.accelerator in CHIPS else "CPU"

    @property
    def local_cores(self) -> int:
        return CHIPS.get(self.settings.accelerator) or self.settings.cores or 4

    @property
    def estimate(self) -> Estimate:
        longest = self.settings.session_hours * 3600
        if self.device == "CPU":
            return Estimate(longest=longest, notes=("without an accelerator: no quota is used",))
        what = f"{self.settings.accelerator} on Kaggle"
        price = Price(1.0, what, f"{date.today()}", "Kaggle's weekly quota", unit="TPU hours")
        if self.quota is None:
            return Estimate(price, longest=longest, notes=("Kaggle does not report a quota",))
        return Estimate(price, longest=longest, left=self.quota.left, until=self.quota.refresh)

    @property
    def cannot(self) -> Mapping[str, str]:
        return MappingProxyType(
            {
                "stop": "Kaggle has no way to stop a session from outside: the interrupt key and "
                "`tpunb stop` only show the link to its page. It ends with the run, or after "
                f"{self.settings.session_hours:g} h (session_hours of [places.{self.place.name}])",
                "background": "a run on Kaggle outlives the kernel: use --detach, which returns at "
                "once, and `%tpu_attach` for its result",
            }
        )

    def machine(self, here: Machine) -> Machine:
        tpu = self.device == "TPU"
        return replace(
            here,
            platform=self.place.kind,
            kind=f"place {self.place.name}",
            device=self.device,
            chips=CHIPS.get(self.settings.accelerator, 0),
            generation="",
            accelerator_type="v5litepod-8" if tpu else "",
            workers=1,
        )

    def paths(self, entries: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """Return the session's working directory: only the files of `files` are sent."""
        return ".", ()

    def resume(self, run: RunDir) -> str:
        known = records.read_dict(run.place)
        ref = known.get("ref")
        if shared := self.settings.checkpoints:
            return f"{shared.rstrip('/')}/{run.id}"
        if not isinstance(ref, str):
            raise TpunbError(
                f"--resume: run {run.id} was not on Kaggle, so the session cannot read its "
                "checkpoints: give a URL that it can read, or name one as `checkpoints` of "
                f"[places.{self.place.name}]"
            )
        return f"{EARLIER}{ref}"

    def without_checkpoints(self) -> list[str]:
        return []

    def placed(self, run_id: str, *, detached: bool) -> KaggleRun:
        ref = f"{self.owner}/{_slug(run_id)}"
        left = None if self.quota is None else self.quota.left
        return KaggleRun(self.config, ref, str(self.root), left, detached=True)


def _slug(run_id: str) -> str:
    """The end of the notebook's URL, which Kaggle makes from the title."""
    words = re.sub(r"[^a-z0-9]+", "-", f"tpunb-{run_id}".lower()).strip("-")
    if len(words) <= _TITLE:
        return words
    # Otherwise two long names with the same beginning would overwrite each other.
    mark = hashlib.sha256(run_id.encode()).hexdigest()[:6]
    return f"{words[: _TITLE - 7].rstrip('-')}-{mark}"


def find_kaggle(
    place: PlaceConfig, cwd: Path, say: Callable[[str], None], cancelled: Callable[[], bool]
) -> KaggleTarget:
    """Query Kaggle for the login and the rest of the quota.

    Raises PlaceError without a login or a quota, MissingPackageError without Kaggle's client.
    """
    say("querying Kaggle for the login and the quota")
    try:
        service = kaggle_service.connect(cancelled)
        quota = service.quota()
    except Cancelled:
        raise TpunbError("interrupted before the run began: nothing was started") from None
    root = place.file.parent if cwd.is_relative_to(place.file.parent) else cwd
    target = KaggleTarget(place, service.username, quota, root)
    if target.device == "TPU" and quota is not None and quota.left <= 0:
        raise PlaceError(
            f"this week's {quota.allowed:g} TPU hours on Kaggle are used up; the quota is renewed "
            f"at {quota.refresh}. Nothing was started"
        )
    if cancelled():
        raise TpunbError("interrupted before the run began: nothing was started")
    return target


@dataclass(frozen=True)
class KaggleReport:
    """The report of `tpunb doctor --on` about Kaggle."""

    place: PlaceConfig
    owner: str
    quota: Quota | None
    problem: str = ""

    def problems(self) -> list[tuple[str, str]]:
        return [(HOST, self.problem)] if self.problem else []

    def to_json(self) -> dict[str, Any]:
        quota = self.quota
        return {
            "place": self.place.name,
            "kind": self.place.kind,
            "login": self.owner,
            "tpu_hours_left": None if quota is None else round(quota.left, 2),
            "tpu_hours_a_week": None if quota is None else quota.allowed,
            "refresh": "" if quota is None else quota.refresh,
            "problems": [{"host": host, "message": what} for host, what in self.problems()],
        }

    def text(self) -> str:
        lines = [f"place {self.place.name} (Kaggle)"]
        if self.owner:
            lines.append(f"login: {self.owner}")
        if self.quota is not None:
            lines.append(
                f"quota: {self.quota.left:.2f} of {self.quota.allowed:g} TPU hours left, renewed "
                f"at {self.quota.refresh}"
            )
        return "\n".join([*lines, *(f"problem: {what}" for _, what in self.problems())])


def inspect_kaggle(place: PlaceConfig) -> KaggleReport:
    """Check the login, and the rest of the quota."""
    try:
        service = kaggle_service.connect()
        quota = service.quota()
    except TpunbError as error:
        return KaggleReport(place, "", None, str(error))
    used_up = quota is not None and quota.left <= 0
    return KaggleReport(place, service.username, quota, "this week's quota is used up" * used_up)


class KagglePlace(Place):
    """A run on Kaggle: its notebook, and the notebook's session."""

    placed: KaggleRun

    def __init__(self, run: RunDir, placed: KaggleRun) -> None:
        super().__init__(run, placed)
        self._closed = threading.Event()

    @cached_property
    def _service(self) -> KaggleService:
        """Raises PlaceError for another user's login, and the errors of `connect`."""
        service = kaggle_service.connect()
        owner = self.placed.ref.partition("/")[0]
        if service.username != owner:
            raise PlaceError(
                f"the run belongs to {owner} on Kaggle, but you are logged in as "
                f"{service.username}: log in as {owner} (`kaggle auth login`)"
            )
        return service

    @property
    def settings(self) -> KaggleSettings:
        """The place's settings, of its kind's type."""
        return self.placed.place.settings_as(KaggleSettings)

    # Starting

    def start(
        self,
        variables: Mapping[str, str],
        say: Callable[[str], None],
        cancelled: Callable[[], bool],
    ) -> None:
        fields = self._fields(variables)
        if cancelled():
            raise Cancelled
        say(f"sending the notebook to Kaggle, {size(len(fields['text']))}")
        try:
            pushed = self._service.push(fields)
        except NoAnswerError as error:
            # Kaggle may have accepted the notebook all the same.
            say(f"{error}; checking whether the run has started")
            try:
                found = self._is_there()
            except NoAnswerError:
                raise PlaceError(
                    f"{error}, and it is not known whether the run has started. If it has, it is "
                    f"running and uses quota: check {self.placed.url}"
                ) from None
            if not found:
                raise PlaceError(f"{error}: the run has not started") from None
            self.note_taken()
            return
        self.note_taken()
        if pushed.ref != self.placed.ref:
            self.placed = replace(self.placed, ref=pushed.ref)
            self.placed.write(self.run)
        self.run.emit(Note(f"on Kaggle: {self.placed.url}"))
        if pushed.invalid:
            self.run.emit(
                Note(
                    f"Kaggle does not know, or you may not read: {', '.join(pushed.invalid)}. The "
                    "session has started without them. To use a competition's data, accept its "
                    "rules on its page"
                )
            )

    def _fields(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """The fields to save. Raises PlaceError for data that is secret or too large."""
        settings = self.settings
        for name, value in variables.items():
            if secrets.kept_value(name, value) == secrets.HIDDEN:
                raise PlaceError(
                    f"{name} may be a secret, and would be stored in the notebook on Kaggle: add "
                    "it to the notebook's Secrets there (Add-ons), and read it with kaggle_secrets "
                    "in a cell"
                )
        lines = _data_lines(self.run)
        sources = _sources(lines)
        resumed = variables.get(env_vars.RESUME, "")
        if resumed.startswith(EARLIER):
            sources["kernel_data_sources"].append(resumed.removeprefix(EARLIER))
        spec = self.run.read_spec()
        root = Path(self.placed.root)
        files = {name: root / name for name in chosen_files(root, settings.files)}
        # Check the files before they are packed into the notebook.
        for name, path in {**kaggle_notebook.sent_files(self.run), **files}.items():
            self._refuse_login(name, path.read_bytes())
        seconds = int(settings.session_hours * 3600)
        order = {
            "accelerator": settings.accelerator,
            "seconds": seconds,
            "variables": dict(variables),
        }
        text = kaggle_notebook.write_notebook(self.run, spec.name, order, lines, files)
        if len(text) > MOST_SOURCE:
            raise PlaceError(
                f"the notebook would have {size(len(text))}, but Kaggle accepts at most "
                f"{size(MOST_SOURCE)}: use a dataset (%tpu_data) for large data, not cells or "
                "`files`"
            )
        self._refuse_login("the notebook", text.encode())
        slug = self.placed.ref.partition("/")[2]
        return {
            "slug": self.placed.ref,
            "new_title": slug.replace("-", " "),
            "text": text,
            "language": "python",
            "kernel_type": "notebook",
            "is_private": True,
            "enable_internet": settings.internet,
            "machine_shape": settings.accelerator or None,
            "session_timeout_seconds": seconds,
            **sources,
        }

    def _refuse_login(self, where: str, content: bytes) -> None:
        """Raise PlaceError if `content`, which would be sent, has the login to Kaggle in it."""
        if any(secret.encode() in content for secret in self._service.secrets()):
            raise PlaceError(
                f"{where} contains the key or token of your login to Kaggle: remove it; a notebook "
                "on Kaggle reads its inputs without a login"
            )

    def _is_there(self) -> bool:
        """True if Kaggle has the notebook of this run; query for a while. Raises NoAnswerError.

        Kaggle may store a notebook late, or report it late, and its session starts all the same.
        """
        deadline = time.monotonic() + STARTS
        pause = 1.0
        while True:
            late = time.monotonic() > deadline
            try:
                if self._service.status(self.placed.ref) is not None:
                    return True
                if late:
                    return False
            except NoAnswerError:
                if late:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 15.0)

    # Following

    def follow(self, since: Sequence[Mapping[str, int]]) -> Iterator[Said | None]:
        try:
            service = self._service
        except TpunbError as error:
            yield Said(0, ConnectionLost(str(error)))
            return
        follower = _Follower(service, self.placed, self.run, self._closed)
        for line in follower.lines():
            if isinstance(line, End):
                # Kaggle counts the time, and stores the output, after the end of the session.
                if follower.missing:
                    self.run.emit(Note("parts of the session's log are missing"))
                yield from follower.wait_for_output()
                self._tell_quota()
            yield None if line is None else Said(0, line)

    def _tell_quota(self) -> None:
        before = self.placed.left
        try:
            quota = None if before is None else self._service.quota()
        except PlaceError as error:
            self.run.emit(Note(f"the rest of the quota is not known: {error}"))
            return
        if quota is not None and before is not None:
            self.run.emit(
                Note(
                    f"quota: {before:.2f} TPU hours left before the run, {quota.left:.2f} now, as "
                    f"Kaggle counts them; renewed at {quota.refresh}"
                )
            )

    def state(self) -> RunState | None:
        try:
            status = self._service.status(self.placed.ref)
        except TpunbError:
            return None
        if status is None:
            return RunState.LOST
        return _STATES.get(status.name, RunState.RUNNING)

    def stop(self, request: Stop) -> None:
        """Tell the user that the run cannot be stopped from here, and how to stop it."""
        if request.cause is StopCause.HOST_LOST:
            return  # not the user's request: the session has ended
        again = "" if request.now else ". Interrupt again to stop following it"
        self.run.emit(Note(f"{self.placed.cannot_stop}{again}"))

    def release_lifelines(self) -> None:
        """Do nothing: the run does not end with the kernel."""

    def close(self) -> None:
        self._closed.set()

    # Fetching

    def fetch(
        self, patterns: Sequence[str], into: Path, hosts: Sequence[int] | None = None
    ) -> list[Path]:
        """Raises PlaceError while the session is running, and if Kaggle does not answer."""
        files = self._service.outputs(self.placed.ref)
        if not files:
            status = self._service.status(self.placed.ref)
            if status is None or not status.over:
                raise PlaceError(
                    "the session is still running, and its files can be fetched only after its "
                    f"end: {self.placed.url}"
                )
        fetched = []
        for file in files:
            name = place_here(file.name)
            if name is None or not any(matches(name, pattern) for pattern in patterns):
                continue
            path = into / name
            path.parent.mkdir(parents=True, exist_ok=True)
            kaggle_service.download(file, path)
            fetched.append(path)
        return fetched


class _Follower:
    """Reads a session's stream from its log, and watches the session's state."""

    def __init__(
        self, service: KaggleService, placed: KaggleRun, run: RunDir, closed: threading.Event
    ) -> None:
        self._service = service
        self._placed = placed
        self._run = run
        self._closed = closed
        self._unpacker = Unpacker()
        self._log: queue.SimpleQueue[tuple[int, str | _LogEnd]] = queue.SimpleQueue()
        """Output from the threads that read the log, with each thread's number."""
        self._reader = 0
        """Number of the current thread; output of earlier threads is ignored."""
        self._reading = False
        self._said: queue.SimpleQueue[Status | NoAnswerError | None] = queue.SimpleQueue()
        """Kaggle's answers about the session; None: it does not know the notebook."""
        self._asking = False
        self._asked = float("-inf")
        self._unknown = 0
        """Consecutive answers that the notebook does not exist."""
        self._status: Status | None = None
        self._trouble = ""
        self._heard = self._answered = time.monotonic()
        """Time of the latest output of the log, and of the latest answer of any kind."""

    def lines(self) -> Iterator[Line | ConnectionLost | None]:
        """Yield the node's lines, at the end End or ConnectionLost; None while there is nothing."""
        tries, due = 0, time.monotonic()
        over_since: float | None = None
        read_since = float("inf")
        while not self._closed.is_set():
            now = time.monotonic()
            if not self._reading and now >= due:
                due = now + AGAIN[min(tries, len(AGAIN) - 1)]
                tries, read_since = tries + 1, now
                self._read()
            elif self._reading and now - self._heard > SILENT:
                self._reading = False  # abandon the thread
            whole = False
            for line in self._take():
                if isinstance(line, _LogEnd):
                    whole = line is _LogEnd.WHOLE
                    continue
                tries = 0
                yield line
                if isinstance(line, End):
                    return
            self._look()
            if self._unknown >= UNKNOWN:
                yield ConnectionLost(
                    f"Kaggle has no notebook {self._placed.ref} that you may read: it was deleted, "
                    "or the run was never sent",
                    final=True,
                )
                return
            over = self._status is not None and self._status.over
            if over and over_since is None:
                # The log is complete now: read it from its start.
                over_since, due, tries, self._reading = now, now, 0, False
            elif not over:
                over_since = None
            elif over_since is not None and (
                (whole and read_since >= over_since) or now - over_since > LATE
            ):
                yield from self._without_end()
                return
            if now - self._answered > LOST:
                yield ConnectionLost(
                    f"Kaggle has not answered for {duration(LOST)} ({self._trouble}). The session "
                    f"may still be running: {self._placed.url}; `tpunb attach {self._run.id}` "
                    "follows it again"
                )
                return
            yield None

    @property
    def missing(self) -> int:
        """Number of packs of lines that are missing in the log."""
        return self._unpacker.missing

    def wait_for_output(self) -> Iterator[None]:
        """Wait until Kaggle reports the session as ended, which may be late."""
        deadline = time.monotonic() + OUTPUT
        self._run.emit(Phase(PhaseKind.ENDED, "the run has ended; Kaggle stores its output"))
        while not self._closed.is_set():
            self._look(often=4)
            if self._status is not None and self._status.over:
                return
            if time.monotonic() > deadline:
                self._run.emit(
                    Note(
                        "the run has ended, but Kaggle still reports its session as running, as "
                        f"happens at times: check {self._placed.url}, and fetch its files later "
                        f"with `tpunb fetch {self._run.id}`"
                    )
                )
                return
            yield None
            time.sleep(POLL_INTERVAL)

    # The log

    def _read(self) -> None:
        """Read the log from its start, in a thread."""
        self._reader += 1
        self._reading, self._heard = True, time.monotonic()
        self._unpacker.again()
        number = self._reader

        def work() -> None:
            end = _LogEnd.CUT
            try:
                for text in self._service.log(self._placed.ref):
                    self._log.put((number, text))
                    if self._reader != number or self._closed.is_set():
                        return
                end = _LogEnd.WHOLE
            except PlaceError:
                pass  # the session's status shows the reason
            finally:
                self._log.put((number, end))

        threading.Thread(target=work, daemon=True).start()

    def _take(self) -> Iterator[Line | _LogEnd]:
        """Yield new lines of the log, after a short wait."""
        timeout: float | None = POLL_INTERVAL
        while True:
            try:
                number, text = self._log.get(timeout=timeout) if timeout else self._log.get_nowait()
            except queue.Empty:
                return
            timeout = None
            if number != self._reader or not self._reading:
                continue
            if isinstance(text, _LogEnd):
                self._reading = False
                yield text
                continue
            self._heard = self._answered = time.monotonic()
            yield from self._unpacker.feed(text)

    # Its state

    def _look(self, often: int = 1) -> None:
        """Process Kaggle's latest answer about the session, and query again when it is time."""
        now = time.monotonic()
        if not self._asking and now - self._asked >= ASK / often:
            self._asking, self._asked = True, now
            threading.Thread(target=self._ask, daemon=True).start()
        try:
            answer = self._said.get_nowait()
        except queue.Empty:
            return
        self._asking = False
        if isinstance(answer, NoAnswerError):
            self._trouble = str(answer)
            return
        self._answered = now
        if answer is None:
            self._unknown += 1
            return
        self._unknown = 0
        if self._status is None or answer.name != self._status.name:
            self._tell(answer)
        self._status = answer

    def _ask(self) -> None:
        try:
            self._said.put(self._service.status(self._placed.ref))
        except NoAnswerError as error:
            self._said.put(error)
        except PlaceError as error:
            self._said.put(NoAnswerError(str(error)))

    def _tell(self, status: Status) -> None:
        if status.name == "QUEUED":
            self._run.emit(Phase(PhaseKind.QUEUED, "waiting in Kaggle's queue"))
        elif status.name == "RUNNING" and not self._unpacker.begun:
            self._run.emit(Phase(PhaseKind.STARTING, "the session on Kaggle has begun"))

    # The end of a session whose log has no end

    def _without_end(self) -> Iterator[Line | ConnectionLost]:
        """Yield the run's files in the session's output, then the end (or ConnectionLost)."""
        returncode: int | None = None
        try:
            files = self._service.outputs(self._placed.ref)
            for file in sorted(files, key=lambda file: file.name.endswith(f"/{stream.RESULT}")):
                name = file.name.removeprefix(f"{FOLDER}/")
                if name == file.name or not stream.is_streamed(name):
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder, "file")
                    kaggle_service.download(file, path)
                    content = path.read_bytes()
                now = time.time()
                if name.endswith(stream.GROWING):
                    yield Append(name, 0, content, now)
                else:
                    yield Replace(name, content, now)
                if name == stream.RESULT:
                    returncode = _returncode(content)
        except (PlaceError, OSError) as error:
            self._run.emit(Note(f"the session's output could not be fetched: {error}"))
        if returncode is not None:
            yield End(returncode)
            return
        yield ConnectionLost(self._describe_end(), final=True)

    def _describe_end(self) -> str:
        assert self._status is not None
        name, failure = self._status.name, self._status.failure
        if name == "CANCEL_ACKNOWLEDGED":
            return f"its session was cancelled on its page, {self._placed.url}"
        why = f": {failure}" if failure else ""
        return (
            f"Kaggle has ended its session before the run had ended ({name}{why}). Its log is at "
            f"{self._placed.url}; a session that is cut off keeps no output"
        )


def _returncode(content: bytes) -> int | None:
    """The exit code in a result.json; None if it cannot be read."""
    try:
        result = records.parse(content)
        return int(result["returncode"] or 0)
    except (ValueError, KeyError, TypeError):
        return None


class _LogEnd(Enum):
    """How reading the log has ended: with the log, or with the connection."""

    WHOLE = "whole"
    CUT = "cut"


def _data_lines(run: RunDir) -> list[list[str]]:
    """The words of the %tpu_data lines up to the train cell. Raises PlaceError."""
    known = records.read_dict(run.snapshot)
    cells = known.get("cells", [])
    train = known.get("train")
    lines = []
    for cell in cells if train is None else cells[: train + 1]:
        for line in _DATA.findall(cell["source"]) if cell["kind"] == "code" else []:
            if "{" in line or "$" in line:
                raise PlaceError(
                    f"%tpu_data {line}: Kaggle mounts data before any cell runs, so write its "
                    "name without variables"
                )
            try:
                words = shlex.split(line)
            except ValueError as error:
                raise PlaceError(f"%tpu_data {line}: {error}") from None
            if "--upload" not in words:
                lines.append(words)
    return lines


def _sources(lines: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Data that Kaggle must mount, as fields of ApiSaveKernelRequest. Raises DataError."""
    found: dict[str, list[str]] = {f"{kind}_data_sources": [] for kind in _SOURCES}
    for words in lines:
        for source in filter(None, map(data.parse_kaggle, words)):
            kind = source.kind.removesuffix("s")
            handle = source.handle.partition("/versions/")[0]
            found[f"{kind}_data_sources"].append(handle)
    return found


def place_here(name: str) -> str | None:
    """An output file's path in the local run folder; None for files that are there already."""
    if not name.isprintable() or name.startswith("/") or {"", ".", ".."} & {*name.split("/")}:
        return None
    inside = name.removeprefix(f"{FOLDER}/")
    if inside == name:
        return None if "__pycache__" in name.split("/") else f"{OUTPUTS}/{name}"
    own = inside.split("/")[0] in stream.OWN or stream.is_streamed(inside)
    return None if own else inside


def matches(name: str, pattern: str) -> bool:
    """True if a pattern matches a file, or a folder above it."""
    parts = name.split("/")
    paths = ("/".join(parts[: count + 1]) for count in range(len(parts)))
    return any(fnmatch.fnmatchcase(path, pattern.rstrip("/")) for path in paths)


def _open_place(run: RunDir, placed: PlacedRun) -> Place:
    assert isinstance(placed, KaggleRun)
    return KagglePlace(run, placed)


KIND = Kind(find_kaggle, KaggleRun, _open_place, inspect_kaggle)
