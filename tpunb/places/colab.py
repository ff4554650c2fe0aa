"""A run in a session of Google Colab: allocated for it, followed, and given back at its end.

    mirror ── colab new, upload, exec, download, stop ──> session: kernel ──> tpunb node --detach

The run does not depend on the kernel's cell that tells of it (`colab_session.follow`), so whatever
is cut is followed again from what is here. A session costs as long as it is allocated: every way
out gives it back, or says that it may still be there.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import queue
import secrets
import tarfile
import tempfile
import threading
import time
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from tpunb.machine.machine import Machine
from tpunb.places import colab_session, environment, transfer
from tpunb.places.check import own_versions
from tpunb.places.colab_tool import (
    ENDING,
    ColabError,
    ColabTool,
    Session,
    Usage,
    end,
    find_tool,
    last_words,
)
from tpunb.places.config import ColabSettings, PlaceConfig
from tpunb.places.errors import HostsError, PlaceError
from tpunb.places.hosts import extract
from tpunb.places.place import Cancelled, HostGone, Place, PlacedRun, Said
from tpunb.places.target import Estimate, Kind, Target
from tpunb.places.transport import HostProcess
from tpunb.runs import stream
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note
from tpunb.runs.result import RunResult
from tpunb.runs.spec import Device, Price, RunState
from tpunb.runs.stream import End, Line, Start, Stop
from tpunb.utils import records
from tpunb.utils.errors import TpunbError
from tpunb.utils.files import LineBuffer

HOST = "colab"
"""What the session is called among a run's hosts."""
UNITS = "compute units"
SOURCE = "`colab usage`"
CPU_CORES = 2
"""Ranks of a session without a TPU: such a machine has two processors."""
ACCELERATORS = {"v5e1": "v5litepod-1", "v6e1": "v6e-1"}
"""By Colab's names, as the runtime calls them."""
TURN = 600.0
"""Seconds of one cell that follows."""
SILENT, FIRST = 60.0, 180.0
"""Seconds without a word of it, and until its first one, after which it is taken for cut: `colab
exec` does not notice."""
AGAIN = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 120.0)
"""Seconds until the next try to follow."""
LOOK = 0.1
"""Seconds that `follow` waits for a line before it says that there is none."""
INSTALLING, PACKING = 1800.0, 3600.0
"""Seconds that these may take there."""
TRIES = 3
"""How often a request to stop is uploaded."""
_LONGEST = 4 * colab_session.MOST


@dataclass(frozen=True)
class ColabRun(PlacedRun):
    """A run in a session."""

    session: str
    """Its name. The run's folder in /content is called so as well."""
    root: str
    """The folder here from which files travel."""
    endpoint: str = ""
    """Colab's own name for the session, once there is one."""

    @property
    def leftover(self) -> str:
        return (
            f"Session {self.session} may still be allocated, and cost: `colab stop -s "
            f"{self.session}` gives it back"
        )


def _settings(place: PlaceConfig) -> ColabSettings:
    assert isinstance(place.settings, ColabSettings)
    return place.settings


@dataclass(frozen=True)
class ColabTarget(Target):
    """An account that is logged in. Nothing is allocated before the run."""

    config: PlaceConfig
    root: Path
    cwd: Path
    usage: Usage | None

    @property
    def place(self) -> PlaceConfig:
        return self.config

    @property
    def hosts(self) -> tuple[str, ...]:
        return (HOST,)

    @property
    def device(self) -> Device:
        return "CPU" if _settings(self.config).accelerator == "cpu" else "TPU"

    @property
    def local_cores(self) -> int:
        return 1 if self.device == "TPU" else CPU_CORES

    @property
    def estimate(self) -> Estimate:
        left = "" if self.usage is None else f"; {self.usage.balance:.2f} {UNITS} are left"
        return Estimate(
            unknown=f"Colab says how many {UNITS} an hour a session uses once there is one{left}"
        )

    def machine(self, here: Machine) -> Machine:
        return replace(
            here,
            platform=self.place.kind,
            kind=f"place {self.place.name}",
            device=self.device,
            chips=int(self.device == "TPU"),
            generation="",
            accelerator_type=ACCELERATORS.get(_settings(self.config).accelerator, ""),
            workers=1,
        )

    def placed(self, run_id: str, *, detached: bool) -> ColabRun:
        return ColabRun(self.config, f"tpunb-{run_id}", str(self.root), detached=detached)

    def paths(self, entries: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """Relative to /content, which stands for `root`: files that travel are put there."""
        below = [Path(entry or self.cwd).absolute() for entry in entries]
        path = dict.fromkeys(
            os.path.relpath(entry, self.cwd)
            for entry in (self.cwd, *below)
            if entry.is_relative_to(self.root) and "site-packages" not in entry.parts
        )
        return os.path.relpath(self.cwd, self.root), tuple(path)

    def resume(self, run: RunDir) -> str:
        shared = self.config.settings.checkpoints
        if not shared:
            raise TpunbError(
                f"--resume: a new session has no checkpoints of run {run.id}: name a URL (gs://…) "
                f"as `checkpoints` of [places.{self.place.name}], or give one"
            )
        return f"{shared.rstrip('/')}/{run.id}"

    def without_checkpoints(self) -> list[str]:
        return [
            "what tpunb.save writes is fetched when the run has ended; if Colab takes the session "
            f"back before, it is lost: name a URL (gs://…) as `checkpoints` of "
            f"[places.{self.place.name}]"
        ]

    def notes(self, script: str) -> list[str]:
        keeps = "the session stays when the run has ended, and costs (keep)"
        return [*super().notes(script), *([keeps] if _settings(self.config).keep else [])]


def find_colab(
    place: PlaceConfig, cwd: Path, say: Callable[[str], None], cancelled: Callable[[], bool]
) -> ColabTarget:
    """Ask whether the account can be reached, and what it has left. Raises ColabError."""
    tool = ColabTool(_settings(place).auth)
    say(f"asking Colab about place {place.name}")
    tool.sessions()
    usage = tool.usage()
    if cancelled():
        raise TpunbError("interrupted before the run began: nothing was started")
    root = place.file.parent if cwd.is_relative_to(place.file.parent) else cwd
    return ColabTarget(place, root, cwd, usage)


class ColabPlace(Place):
    """One session."""

    placed: ColabRun

    def __init__(self, run: RunDir, placed: ColabRun) -> None:
        super().__init__(run, placed)
        self._tool = ColabTool(_settings(placed.place).auth)
        self._settings = _settings(placed.place)
        self._name = placed.session
        self._hello: Line | None = None
        self._cell: _Cell | None = None
        """The one that tells of the run."""
        self._ended = False
        """The run has, and this has followed it: the kernel is free."""
        self._stops = 0
        self._large: list[str] = []
        """What the run has left there that was not followed."""
        self._gone = False
        """There is no session any more."""

    # Starting

    def start(
        self,
        variables: Mapping[str, str],
        say: Callable[[str], None],
        cancelled: Callable[[], bool],
    ) -> None:
        say(f"waiting for Colab to give a session with {self._settings.accelerator}")
        try:
            self._tool.new(self._name, self._settings.accelerator)
        except ColabError as error:
            raise ColabError(f"{error}{self._release()}{self._nameless()}", error.why) from None
        try:
            self._note_session()
            if cancelled():
                raise Cancelled
            self._begin(variables, say, cancelled)
        except BaseException as error:
            self.close()
            kept = self._release()
            if kept and isinstance(error, TpunbError):
                raise PlaceError(f"{error}{kept}") from None
            if kept:
                say(kept.lstrip("; "))
            raise

    def _note_session(self) -> None:
        """What Colab calls it, by which it is known if `colab` forgets its name; what it costs."""
        sessions = self._tool.sessions()
        for session in sessions:
            if session.name == self._name:
                self.placed = replace(self.placed, endpoint=session.endpoint)
                self.placed.write(self.run)
        usage = self._tool.usage()
        if usage is None or not usage.rate or len(sessions) > 1:
            return  # Colab says the rate of all sessions together
        what = f"{self._settings.accelerator} of Colab"
        price = Price(usage.rate, what, date.today().isoformat(), SOURCE, UNITS)
        self.run.write_spec(replace(self.run.read_spec(), price=price))
        self.run.emit(Note(f"{price}; left: {usage.balance:.2f} {UNITS}"))

    def _begin(
        self,
        variables: Mapping[str, str],
        say: Callable[[str], None],
        cancelled: Callable[[], bool],
    ) -> None:
        say("uploading the run, and tpunb")
        self._tool.upload(self._name, self._bundle(variables), f"{self._name}.tar", cancelled)
        packages = list(self._settings.packages)
        say(f"installing {', '.join([*packages, 'tpunb'])} in the session, and starting")
        follower = secrets.token_hex(8)
        order = {"packages": packages, "wheel": environment.WHEEL, "follower": follower}
        self._cell = _Cell(self._tool, self._name, "begin", {**order, "seconds": TURN})
        begun = self._answer(self._cell, INSTALLING, cancelled)
        self._compare(records.convert(Mapping[str, str], begun["versions"]), begun)
        if "error" in begun:
            raise HostsError(self.placed.place.name, ((HOST, str(begun["error"])),))
        self._hello = stream.decode(str(begun["hello"]))

    def _compare(self, theirs: Mapping[str, str], begun: Mapping[str, Any]) -> None:
        """Whether the session has what a run needs. Raises HostsError."""
        mine = own_versions()
        if "missing" in begun:
            missing = " and ".join(map(str, begun["missing"]))
            wanted = f'packages = ["torch=={mine["torch"]}", "torch_xla[tpu]=={mine["torch_xla"]}"]'
            raise HostsError(
                self.placed.place.name,
                ((HOST, f"the session has no {missing}: write {wanted} in places.toml"),),
            )
        differ = [
            f"{name} {theirs[name] or 'is missing'}, and {mine[name]} here"
            for name in ("python", "torch", "torch_xla")
            if theirs[name].partition("+")[0] != mine[name].partition("+")[0]
        ]
        if differ:
            self.run.emit(Note(f"the session has other packages: {'; '.join(differ)}"))

    def _bundle(self, variables: Mapping[str, str]) -> bytes:
        """The run's folder and variables, tpunb, and the files that travel, as an archive."""
        data = io.BytesIO()
        root = Path(self.placed.root)
        with tarfile.open(fileobj=data, mode="w", dereference=True) as archive:
            for name in stream.SENT:
                if (self.run.path / name).exists():
                    archive.add(self.run.path / name, f"run/{name}")
            start = stream.encode(Start(secrets.token_hex(32), dict(variables)))
            for name, content in (
                ("start.json", start),
                (environment.WHEEL, environment.build_wheel()),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
            for name in transfer.chosen_files(root, self._settings.files):
                archive.add(root / name, f"files/{name}")
        return data.getvalue()

    def _upload(self, data: bytes, name: str) -> None:
        self._tool.upload(self._name, data, f"{self._name}/{name}")

    def _answer(
        self, cell: _Cell, patience: float, cancelled: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """What a cell says first. Raises ColabError and Cancelled."""
        deadline = time.monotonic() + patience
        while (said := cell.next(LOOK)) is None:
            if cancelled():
                raise Cancelled
            if cell.over or time.monotonic() > deadline:
                raise ColabError(f"the session does not answer: {cell.reason()}")
        return said

    # Following

    def follow(self, since: Sequence[Mapping[str, int]]) -> Iterator[Said | None]:
        if self._hello is not None:
            yield Said(0, self._hello)
        tries, alone = 0, False
        while True:
            problem = ""
            if self._cell is None:
                follower = secrets.token_hex(8)
                try:
                    if not alone:
                        # Who followed before may still be in the kernel's one cell.
                        self._upload(follower.encode(), "follower.txt")
                    order = {"since": dict(since[0]), "follower": follower, "seconds": TURN}
                    self._cell = _Cell(self._tool, self._name, "follow", order)
                except ColabError as error:
                    problem = str(error)
            alone = False
            if self._cell is not None:
                turn = _Turn(self._cell)
                for said in turn.lines():
                    tries = 0 if said is not None else tries
                    yield None if said is None else Said(0, said)
                self.close()
                if turn.ended:
                    self._large, self._ended = turn.large, True
                    return
                if turn.again:
                    alone = True
                    continue
                problem = turn.problem
            if lost := self._why_lost():
                self._gone = True
                yield Said(0, HostGone(lost, final=True))
                return
            if tries == len(AGAIN):
                goes_on = (
                    f"; session {self._name} may go on, and costs: `tpunb attach {self.run.id}` "
                    f"follows it again, `colab stop -s {self._name}` ends it"
                )
                yield Said(0, HostGone(f"{problem}{goes_on * self.placed.detached}"))
                return
            due = time.monotonic() + AGAIN[tries]
            tries += 1
            while time.monotonic() < due:
                time.sleep(LOOK)
                yield None

    def _why_lost(self) -> str:
        """Why there is nothing to be followed any more; '' where that is not known."""
        try:
            if self._is_there():
                return ""
        except ColabError:
            return ""
        return f"Colab has taken the session back: {self._name} is not among `colab sessions`"

    def _is_there(self) -> bool:
        """Whether the session is allocated. Raises ColabError."""
        own = (self._name, self.placed.endpoint)
        return any(own[0] == each.name or own[1] == each.endpoint for each in self._tool.sessions())

    def stop(self, request: Stop) -> None:
        if self._gone:
            return
        self._stops += 1
        threading.Thread(target=self._pass_on, args=(request, self._stops)).start()

    def _pass_on(self, request: Stop, number: int) -> None:
        """In a thread: an upload takes seconds."""
        for left in reversed(range(TRIES)):
            try:
                self._upload(stream.encode(request), f"stop-{os.getpid()}-{number}.json")
                return
            except ColabError as error:
                if not left and not self._gone:
                    text = (
                        f"the request to stop was not passed on: {error}. "
                        f"`colab stop -s {self._name}` ends the session, and the run with it"
                    )
                    self.run.emit(Note(text))
            time.sleep(1.0)

    def let_go(self) -> None:
        """A request to stop has said it: no connection keeps the run alive."""

    def close(self) -> None:
        cell, self._cell = self._cell, None
        if cell is not None:
            cell.close()

    # The end

    def state(self) -> RunState | None:
        try:
            if not self._is_there():
                return RunState.LOST
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "result.json")
                self._tool.download(self._name, f"{self._name}/run/{stream.RESULT}", file)
                return RunResult.from_json(records.read(file), self.run.path).state
        except (ColabError, OSError, ValueError):
            return None

    def fetch(
        self, patterns: Sequence[str], into: Path, hosts: Sequence[int] | None = None
    ) -> list[Path]:
        """Raises ColabError where there is no session any more, and HostsError."""
        name = f"pack-{secrets.token_hex(4)}"
        order = {"name": name, "patterns": list(patterns)}
        if not self._ended and not self._is_there():
            raise ColabError(
                f"session {self._name} was given back: what its run has left was fetched when it "
                f"ended, and is in {self.run.path}"
            )
        with tempfile.TemporaryDirectory(dir=into) as folder:
            if self.run.is_running() and not self._ended:
                # Somebody else follows, in the kernel's one cell.
                self._upload((json.dumps(order) + "\n").encode(), f"{name}.json")
                made = self._wait_for_parts(name, Path(folder, "parts.json"))
            else:
                cell = _Cell(self._tool, self._name, "packed", order)
                try:
                    made = self._answer(cell, PACKING)
                finally:
                    cell.close()
            if made.get("error"):
                told = (HOST, str(made["error"]))
                raise HostsError(self.placed.place.name, (told,), "nothing was fetched")
            with tempfile.TemporaryFile(dir=into) as archive:
                for number in range(int(made["parts"])):
                    if "data" in made:
                        archive.write(b64decode(made["data"]))
                        break
                    part = Path(folder, "part")
                    self._tool.download(self._name, f"{self._name}/{name}/part-{number}", part)
                    archive.write(part.read_bytes())
                try:
                    return extract(archive, into, 0, self.run.read_spec().ranks_on(0))
                except (ValueError, tarfile.TarError) as error:
                    told = (HOST, f"what it has sent cannot be read: {error}")
                    raise HostsError(
                        self.placed.place.name, (told,), "not all was fetched"
                    ) from None

    def _wait_for_parts(self, name: str, file: Path) -> dict[str, Any]:
        """What `pack` says, once it does. Raises ColabError."""
        deadline = time.monotonic() + PACKING
        while True:
            try:
                self._tool.download(self._name, f"{self._name}/{name}/parts.json", file)
                return records.read_dict(file)
            except ColabError:
                if time.monotonic() > deadline or self._why_lost():
                    raise
                time.sleep(1.0)

    def finish(self, say: Callable[[str], None]) -> None:
        if self._gone:
            return
        if self._large:
            try:
                self.fetch(self._large, self.run.path)
            except (TpunbError, OSError) as error:
                wanted = " ".join(f"--files {name}" for name in self._large)
                say(
                    f"{' and '.join(self._large)} could not be fetched ({error}), so session "
                    f"{self._name} stays, and costs: `tpunb fetch {self.run.id} {wanted}`, then "
                    f"`colab stop -s {self._name}`"
                )
                return
        if self._settings.keep:
            say(f"session {self._name} stays, and costs: `colab stop -s {self._name}` ends it")
            return
        if kept := self._release():
            say(kept.lstrip("; "))

    def _release(self) -> str:
        """Give the session back; '' if that is certain, or what to do about it."""
        try:
            self._tool.stop(self._name)
            if not self._is_there():
                self._gone = True
                return ""
            why = "it is still among `colab sessions`"
        except ColabError as error:
            why = str(error)
        return (
            f"; session {self._name} may still be allocated, and cost, because it could not be "
            f"given back ({why}): `colab stop -s {self._name}`, or Runtime, Manage sessions at "
            "https://colab.research.google.com"
        )

    def _nameless(self) -> str:
        """What to look at after an allocation that failed; '' for nothing.

        Colab may have given a session whose name `colab` has not noted any more.
        """
        with contextlib.suppress(ColabError):
            if any(session.name == "?" for session in self._tool.sessions()):
                return (
                    "; your account has a session that `colab` has no name for, and if it is from "
                    "this attempt it costs: look at Runtime, Manage sessions at "
                    "https://colab.research.google.com"
                )
        return ""


class _Cell:
    """A cell in the session's kernel, by `colab exec`, and what it says."""

    def __init__(self, tool: ColabTool, name: str, verb: str, order: Mapping[str, Any]) -> None:
        words = json.dumps({"folder": name, **order})
        code = (
            "import json\n_tpunb = {'__name__': 'tpunb'}\n"
            f"exec({inspect.getsource(colab_session)!r}, _tpunb)\n"
            f"_tpunb[{verb!r}](**json.loads({words!r}))\n"
        )
        self._process: HostProcess = tool.execute(name, code)
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue(64)
        self._last = ""
        self.over = False
        """It says nothing more."""
        self.said_last = False
        """It ends by itself."""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        lines = LineBuffer(_LONGEST)
        mark = colab_session.MARK.encode()
        while True:
            try:
                data = os.read(self._process.output.fileno(), 1 << 18)
            except (OSError, ValueError):  # it was closed here
                data = b""
            if not data:
                break
            for line in lines.feed(data):
                if not line.startswith(mark):
                    self._last = line.decode("utf-8", "replace").strip() or self._last
                    continue
                with contextlib.suppress(ValueError):
                    said = records.parse(line.removeprefix(mark))
                    if isinstance(said, dict):
                        self._said.put(said)
        self._said.put(None)

    def next(self, timeout: float) -> dict[str, Any] | None:
        """What it says next; None if it says nothing for so many seconds, or any more (`over`)."""
        try:
            said = None if self.over else self._said.get(timeout=timeout)
        except queue.Empty:
            return None
        self.over = said is None
        return said

    def reason(self) -> str:
        """Why it has ended, as `colab` says it."""
        told = last_words(self._process.errors()) or last_words(self._last)
        return told or "`colab exec` has ended without a word"

    def close(self) -> None:
        """End `colab exec`, whatever the cell does."""
        if not self.over and not self.said_last:
            end(self._process.pid, self._process.wait)
        else:
            self._process.wait(ENDING)
        self._process.close()


class _Turn:
    """One cell that follows: what it says, and how it has ended."""

    def __init__(self, cell: _Cell) -> None:
        self.cell = cell
        self.ended = False
        """The run has, and everything was said."""
        self.again = False
        """It has not; the cell was long enough."""
        self.problem = ""
        """Why it has ended in another way."""
        self.large: list[str] = []

    def lines(self) -> Iterator[Line | None]:
        """Lines of the stream; None whenever nothing has come."""
        reader = stream.StreamReader(_LONGEST)
        number, heard, last = 0, time.monotonic(), False
        while True:
            said = self.cell.next(LOOK)
            if said is None:
                if self.cell.over:
                    self.problem = self.cell.reason()
                    return
                patience = SILENT if number else FIRST
                if time.monotonic() - heard > patience:
                    self.problem = f"the session has said nothing for {patience:g} s"
                    return
                yield None
                continue
            heard = time.monotonic()
            if "over" in said:
                self.cell.said_last = True
                self.large = [str(name) for name in said.get("large", ())]
                if said.get("error"):
                    last = True
                    yield End(1, str(said["error"]))
                self.ended = bool(said["over"]) and last
                self.again = not said["over"]
                self.problem = "" if last else "the run's folder is not told of any more"
                return
            if said.get("number") != number:
                self.problem = "a part of what the session said is missing"
                return
            number += 1
            for line in reader.feed(zlib.decompress(b64decode(said["data"]))):
                if not isinstance(line, str):
                    last = last or isinstance(line, End)
                    yield line


# tpunb doctor --on


@dataclass(frozen=True)
class ColabReport:
    """What `tpunb doctor --on` finds out."""

    place: PlaceConfig
    tool: str | None
    """Where `colab` is."""
    version: str
    sessions: Sequence[Session]
    usage: Usage | None
    problem: str
    """Why the account is not reached; '' if it is."""

    def problems(self) -> list[tuple[str, str]]:
        return [(HOST, self.problem)] if self.problem else []

    def to_json(self) -> dict[str, Any]:
        return {
            "place": self.place.name,
            "kind": self.place.kind,
            "tool": self.tool,
            "version": self.version,
            "sessions": [asdict(session) for session in self.sessions],
            "compute_units": None if self.usage is None else self.usage.balance,
            "compute_units_an_hour": None if self.usage is None else self.usage.rate,
            "problems": [{"host": host, "message": what} for host, what in self.problems()],
        }

    def text(self) -> str:
        place = self.place
        lines = [f"place {place.name} ({place.kind}, {place.file})"]
        if self.tool is not None:
            lines.append(f"{self.tool}, {self.version or 'of an unknown version'}")
        if self.problem:
            return "\n".join([*lines, f"problem: {self.problem}"])
        lines += [f"session {each.name}: {each.hardware}" for each in self.sessions]
        if not self.sessions:
            lines.append("no session is allocated")
        if self.usage is not None:
            lines.append(
                f"{self.usage.balance:.2f} {UNITS} left, {self.usage.rate:.2f} an hour are used now"
            )
        accelerator = _settings(place).accelerator
        return "\n".join([*lines, f"ready: %%tpu_train --on {place.name} asks for {accelerator}"])


def inspect_colab(place: PlaceConfig) -> ColabReport:
    """Whether `colab` is there and logged in, and which sessions there are."""
    tool = ColabTool(_settings(place).auth)
    version, problem, usage = "", "", None
    sessions: Sequence[Session] = ()
    try:
        version = tool.version()
        sessions = tool.sessions()
        usage = tool.usage()
    except ColabError as error:
        problem = str(error)
    return ColabReport(place, find_tool(), version, sessions, usage, problem)


def _open(run: RunDir, placed: PlacedRun) -> Place:
    assert isinstance(placed, ColabRun)
    return ColabPlace(run, placed)


KIND = Kind(find_colab, ColabRun, _open, inspect_colab)
"""Of `kind = "colab"`."""
