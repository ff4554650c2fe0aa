"""Runs on Kaggle: each one is a private notebook (`kaggle_notebook`), run by its session.

The stream comes from the session's log (`log_stream`), which Kaggle's load balancer cuts when it is
idle, and then repeats from the start. Files are available once the session has ended. Kaggle has no
way to end a session from outside, so every run outlives the kernel and cannot be stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import re
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tpunb import data
from tpunb.places import kaggle_notebook, kaggle_service
from tpunb.places.config import KaggleSettings, PlaceConfig
from tpunb.places.errors import PlaceError
from tpunb.places.kaggle_service import KaggleService, NoAnswerError, Quota, SessionStatus
from tpunb.places.kaggle_session import EARLIER, FOLDER
from tpunb.places.log_stream import Unpacker
from tpunb.places.place import Cancelled, Check, ConnectionLost, HostLine, Place, PlacedRun, Say
from tpunb.places.target import Estimate, PlaceKind, PlaceReport, PlaceTarget
from tpunb.places.transfer import chosen_files
from tpunb.runs import stream
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note, Phase
from tpunb.runs.folder_stream import read_ended
from tpunb.runs.spec import Device, PhaseKind, Price, RunState, Stop, StopCause
from tpunb.runs.stream import End, Line
from tpunb.utils import env_vars, patience, records, secrets
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
"""Seconds without an answer from Kaggle after which tpunb stops following the run; `tpunb
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
class KaggleTarget(PlaceTarget):
    """A future session on Kaggle."""

    place: PlaceConfig
    owner: str
    quota: Quota | None
    root: Path

    @property
    def settings(self) -> KaggleSettings:
        return self.place.settings_as(KaggleSettings)

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

    @property
    def facts(self) -> Mapping[str, Any]:
        chips = CHIPS.get(self.settings.accelerator, 0)
        return {"chips": chips, "accelerator_type": "v5litepod-8" if chips else ""}

    def paths(self, entries: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """Return the session's working directory: only the files of `files` are sent."""
        return ".", ()

    def resume(self, run: RunDir) -> str:
        if shared := self.place.checkpoints(run.id):
            return shared
        ref = records.read_dict(run.place).get("ref")
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
        return KaggleRun(self.place, ref, str(self.root), left, detached=True)


def _slug(run_id: str) -> str:
    """The end of the notebook's URL, which Kaggle makes from the title."""
    words = re.sub(r"[^a-z0-9]+", "-", f"tpunb-{run_id}".lower()).strip("-")
    if len(words) <= _TITLE:
        return words
    # Otherwise two long names with the same beginning would overwrite each other.
    mark = hashlib.sha256(run_id.encode()).hexdigest()[:6]
    return f"{words[: _TITLE - 7].rstrip('-')}-{mark}"


def find_kaggle(place: PlaceConfig, cwd: Path, say: Say, cancelled: Check) -> KaggleTarget:
    """Query Kaggle for the login and the rest of the quota.

    Raises PlaceError without a login or a quota, MissingPackageError without Kaggle's client, and
    Cancelled.
    """
    say("querying Kaggle for the login and the quota")
    service = kaggle_service.connect(cancelled)
    quota = service.quota()
    target = KaggleTarget(place, service.username, quota, place.root(cwd))
    if target.device == "TPU" and quota is not None and quota.left <= 0:
        raise PlaceError(
            f"this week's {quota.allowed:g} TPU hours on Kaggle are used up; the quota is renewed "
            f"at {quota.refresh}. Nothing was started"
        )
    return target


def inspect_kaggle(place: PlaceConfig) -> PlaceReport:
    """Check the login, and the rest of the quota."""
    try:
        service = kaggle_service.connect()
        quota = service.quota()
    except TpunbError as error:
        return PlaceReport(place, (), ((HOST, str(error)),), {"login": ""})
    lines = [f"login: {service.username}"]
    details: dict[str, Any] = {"login": service.username, "tpu_hours_left": None}
    problems: tuple[tuple[str, str], ...] = ()
    if quota is not None:
        lines.append(
            f"quota: {quota.left:.2f} of {quota.allowed:g} TPU hours left, renewed at "
            f"{quota.refresh}"
        )
        details |= {
            "tpu_hours_left": round(quota.left, 2),
            "tpu_hours_a_week": quota.allowed,
            "refresh": quota.refresh,
        }
        if quota.left <= 0:
            problems = ((HOST, "this week's quota is used up"),)
    return PlaceReport(place, tuple(lines), problems, details)


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
        return self.placed.place.settings_as(KaggleSettings)

    # Starting

    def start(self, variables: Mapping[str, str], say: Say, cancelled: Check) -> None:
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
        sent: list[Path] = [*files.values()]
        for folder in (self.run.path / name for name in kaggle_notebook.run_files(self.run)):
            sent += [folder] if folder.is_file() else [p for p in folder.rglob("*") if p.is_file()]
        for path in sent:
            self._refuse_login(path.name, path.read_bytes())
        seconds = int(settings.session_hours * 3600)
        order = {
            "accelerator": settings.accelerator,
            "seconds": seconds,
            "variables": dict(variables),
        }
        text = kaggle_notebook.write_notebook(self.run, spec.name, order, lines, files)
        if len(text) > MOST_SOURCE:
            raise PlaceError(
                f"the notebook would take {size(len(text))}, but Kaggle accepts at most "
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

    def follow(self, since: Sequence[Mapping[str, int]]) -> Iterator[HostLine | None]:
        try:
            service = self._service
        except TpunbError as error:
            yield HostLine(0, ConnectionLost(str(error)))
            return
        follower = _Follower(service, self.placed, self.run, self._closed)
        for line in follower.lines():
            if isinstance(line, End):
                # Kaggle counts the time, and stores the output, after the end of the session.
                if follower.missing:
                    self.run.emit(Note("parts of the session's log are missing"))
                yield from follower.wait_for_output()
                self._report_quota()
            yield None if line is None else HostLine(0, line)

    def _report_quota(self) -> None:
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
            if name is None or not stream.matches(name, patterns):
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
        self._asking: Future[SessionStatus | None] | None = None
        """The query about the session that has not been answered; None: there is none."""
        self._asked = float("-inf")
        self._unknown = 0
        """Consecutive answers that the notebook does not exist."""
        self._status: SessionStatus | None = None
        self._trouble = ""
        self._answered = time.monotonic()
        """Time of the latest answer of any kind."""

    def lines(self) -> Iterator[Line | ConnectionLost | None]:
        """Yield the node's lines, at the end End or ConnectionLost; None while there is nothing."""
        tries, due = 0, time.monotonic()
        over_since: float | None = None
        log: _LogReader | None = None
        while not self._closed.is_set():
            now = time.monotonic()
            if log is None and now >= due:
                due = now + AGAIN[min(tries, len(AGAIN) - 1)]
                tries += 1
                log = _LogReader(self._service, self._placed.ref)
                self._unpacker.again()
            elif log is None:
                time.sleep(POLL_INTERVAL)
            elif now - log.heard > SILENT:
                log.wanted, log = False, None
            whole = False
            for text in log.texts() if log is not None else ():
                self._answered = time.monotonic()
                for line in self._unpacker.feed(text):
                    tries = 0
                    yield line
                    if isinstance(line, End):
                        return
            if log is not None and log.ended:
                whole = log.whole and over_since is not None and log.began >= over_since
                log = None
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
                if log is not None:
                    log.wanted = False
                over_since, due, tries, log = now, now, 0, None
            elif not over:
                over_since = None
            elif over_since is not None and (whole or now - over_since > LATE):
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

    # Its state

    def _look(self, often: int = 1) -> None:
        """Process Kaggle's latest answer about the session, and query again when it is time."""
        now = time.monotonic()
        if self._asking is None and now - self._asked >= ASK / often:
            self._asked = now
            self._asking = patience.start(lambda: self._service.status(self._placed.ref))
        if self._asking is None or not self._asking.done():
            return
        answer, self._asking = self._asking, None
        try:
            status = answer.result()
        except PlaceError as error:
            self._trouble = str(error)
            return
        self._answered = now
        if status is None:  # Kaggle does not know the notebook
            self._unknown += 1
            return
        self._unknown = 0
        if self._status is None or status.name != self._status.name:
            self._report_status(status)
        self._status = status

    def _report_status(self, status: SessionStatus) -> None:
        if status.name == "QUEUED":
            self._run.emit(Phase(PhaseKind.QUEUED, "waiting in Kaggle's queue"))
        elif status.name == "RUNNING" and not self._unpacker.begun:
            self._run.emit(Phase(PhaseKind.STARTING, "the session on Kaggle has begun"))

    # The end of a session whose log has no end

    def _without_end(self) -> Iterator[Line | ConnectionLost]:
        """Yield the run's files in the session's output, then the end (or ConnectionLost)."""
        ended = False
        with tempfile.TemporaryDirectory() as folder:
            try:
                for file in self._service.outputs(self._placed.ref):
                    name = file.name.removeprefix(f"{FOLDER}/")
                    if name != file.name and stream.is_streamed(name):
                        path = Path(folder, name)
                        path.parent.mkdir(parents=True, exist_ok=True)
                        kaggle_service.download(file, path)
            except (PlaceError, OSError) as error:
                self._run.emit(Note(f"the session's output could not be fetched: {error}"))
                Path(folder, stream.RESULT).unlink(missing_ok=True)  # it would be the last file
            for line in read_ended(RunDir(folder)):
                ended = isinstance(line, End)
                yield line
        if not ended:
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


class _LogReader:
    """Reads a session's log from its start, in a thread of its own."""

    def __init__(self, service: KaggleService, ref: str) -> None:
        self._texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.began = self.heard = time.monotonic()
        self.ended = False
        """True if the log, or the connection, has ended and all of it was read."""
        self.whole = False
        """True if the log has ended, not the connection."""
        self.wanted = True
        """False to let the thread end at its next output."""
        patience.start(lambda: self._read(service, ref))

    def _read(self, service: KaggleService, ref: str) -> None:
        try:
            for text in service.log(ref):
                if not self.wanted:
                    return
                self._texts.put(text)
            self.whole = True
        except PlaceError:
            pass  # the session's status shows the reason
        finally:
            self._texts.put(None)

    def texts(self) -> Iterator[str]:
        """Yield the new output, after a short wait."""
        timeout = POLL_INTERVAL
        with contextlib.suppress(queue.Empty):
            while (text := self._texts.get(timeout=timeout)) is not None:
                timeout, self.heard = 0.0, time.monotonic()
                yield text
            self.ended = True


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
    return stream.fetched_path(inside, 0, range(sys.maxsize))


KIND = PlaceKind(find_kaggle, KaggleRun, KagglePlace, inspect_kaggle)
