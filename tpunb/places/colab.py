"""Runs in Google Colab: a session is allocated for each run, followed, and released at its end.

    mirror ── colab new, upload, exec, download, stop ──> session: kernel ──> tpunb node --detach

The run does not depend on the kernel's cell that sends its stream (`colab_session.follow`): after a
lost connection it is followed again from the saved offsets. A session costs as long as it is
allocated: every way out releases it, or warns that it may still be allocated.
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
from tpunb.places.place import Cancelled, ConnectionLost, Place, PlacedRun, Said
from tpunb.places.target import Estimate, Kind, Target
from tpunb.places.transport import HostProcess
from tpunb.runs import stream
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note
from tpunb.runs.result import RunResult
from tpunb.runs.spec import Device, Price, RunState, Stop
from tpunb.runs.stream import End, Line, Start
from tpunb.utils import records
from tpunb.utils.errors import TpunbError
from tpunb.utils.files import LineBuffer

HOST = "colab"
"""The session's name among a run's hosts."""
UNITS = "compute units"
SOURCE = "`colab usage`"
CPU_CORES = 2
"""Ranks of a session without a TPU: such a machine has two processors."""
ACCELERATORS = {"v5e1": "v5litepod-1", "v6e1": "v6e-1"}
"""Accelerator types, keyed by Colab's names."""
TURN = 600.0
"""Seconds after which a cell that follows the run is replaced by another one."""
SILENT, FIRST = 60.0, 180.0
"""Seconds between two messages, and until the first one, after which the connection is considered
lost: `colab exec` does not notice it."""
AGAIN = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 120.0)
"""Seconds before each further attempt to follow."""
POLL_INTERVAL = 0.1
"""Seconds that `follow` waits for a line before it yields None."""
INSTALLING, PACKING = 1800.0, 3600.0
"""Time-outs in seconds of installing packages and packing files in the session."""
TRIES = 3
"""Attempts to upload a stop request."""
_LONGEST = 4 * colab_session.MOST


@dataclass(frozen=True)
class ColabRun(PlacedRun):
    """Where a run in Colab was sent."""

    session: str
    """Name of the session, and of the run's folder in /content."""
    root: str
    """The local folder from which files are copied."""
    endpoint: str = ""
    """Colab's own name of the session, once it is allocated."""

    @property
    def leftover(self) -> str:
        return (
            f"Session {self.session} may still be allocated, and cost money: release it with "
            f"`colab stop -s {self.session}`"
        )


@dataclass(frozen=True)
class ColabTarget(Target):
    """A Colab account that is logged in. No session is allocated before the run."""

    config: PlaceConfig
    root: Path
    cwd: Path
    usage: Usage | None

    @property
    def settings(self) -> ColabSettings:
        """The settings of the place."""
        return self.config.settings_as(ColabSettings)

    @property
    def place(self) -> PlaceConfig:
        return self.config

    @property
    def hosts(self) -> tuple[str, ...]:
        return (HOST,)

    @property
    def device(self) -> Device:
        return "CPU" if self.settings.accelerator == "cpu" else "TPU"

    @property
    def local_cores(self) -> int:
        return 1 if self.device == "TPU" else CPU_CORES

    @property
    def estimate(self) -> Estimate:
        left = "" if self.usage is None else f"; {self.usage.balance:.2f} {UNITS} are left"
        return Estimate(
            unknown=f"Colab reports a session's {UNITS} per hour only once it is allocated{left}"
        )

    def machine(self, here: Machine) -> Machine:
        return replace(
            here,
            platform=self.place.kind,
            kind=f"place {self.place.name}",
            device=self.device,
            chips=int(self.device == "TPU"),
            generation="",
            accelerator_type=ACCELERATORS.get(self.settings.accelerator, ""),
            workers=1,
        )

    def placed(self, run_id: str, *, detached: bool) -> ColabRun:
        return ColabRun(self.config, f"tpunb-{run_id}", str(self.root), detached=detached)

    def paths(self, entries: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """Return paths relative to /content, to which the files of `root` are copied."""
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
            "checkpoints of tpunb.save are fetched after the end of the run, and lost if Colab "
            "ends the session before. To keep them, name a URL (gs://…) as `checkpoints` of "
            f"[places.{self.place.name}]"
        ]

    def notes(self, script: str) -> list[str]:
        keeps = "the session stays allocated after the run, and costs money (`keep`)"
        return [*super().notes(script), *([keeps] if self.settings.keep else [])]


def find_colab(
    place: PlaceConfig, cwd: Path, say: Callable[[str], None], cancelled: Callable[[], bool]
) -> ColabTarget:
    """Check the login, and query the compute units left. Raises ColabError."""
    tool = ColabTool(place.settings_as(ColabSettings).auth)
    say(f"querying Colab for place {place.name}")
    tool.sessions()
    usage = tool.usage()
    if cancelled():
        raise TpunbError("interrupted before the run began: nothing was started")
    root = place.file.parent if cwd.is_relative_to(place.file.parent) else cwd
    return ColabTarget(place, root, cwd, usage)


class ColabPlace(Place):
    """A run in a Colab session."""

    placed: ColabRun

    def __init__(self, run: RunDir, placed: ColabRun) -> None:
        super().__init__(run, placed)
        self._tool = ColabTool(placed.place.settings_as(ColabSettings).auth)
        self._settings = placed.place.settings_as(ColabSettings)
        self._name = placed.session
        self._hello: Line | None = None
        self._cell: _Cell | None = None
        """The cell that follows the run."""
        self._ended = False
        """True if the run has ended and was followed to its end: the kernel is free."""
        self._stops = 0
        self._large: list[str] = []
        """Folders of the run in the session that are not part of the stream."""
        self._gone = False
        """True if the session does not exist any more."""

    # Starting

    def start(
        self,
        variables: Mapping[str, str],
        say: Callable[[str], None],
        cancelled: Callable[[], bool],
    ) -> None:
        say(f"waiting for Colab to allocate a session with {self._settings.accelerator}")
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
        """Record Colab's own name of the session, in case `colab` loses its name, and its price."""
        sessions = self._tool.sessions()
        for session in sessions:
            if session.name == self._name:
                self.placed = replace(self.placed, endpoint=session.endpoint)
                self.placed.write(self.run)
        usage = self._tool.usage()
        if usage is None or not usage.rate or len(sessions) > 1:
            return  # Colab reports the rate of all sessions together
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
        """Compare the session's packages with the local ones. Raises HostsError."""
        mine = own_versions()
        if "missing" in begun:
            missing = " and ".join(map(str, begun["missing"]))
            wanted = f'packages = ["torch=={mine["torch"]}", "torch_xla[tpu]=={mine["torch_xla"]}"]'
            raise HostsError(
                self.placed.place.name,
                ((HOST, f"the session has no {missing}: write {wanted} in places.toml"),),
            )
        differ = [
            f"{name} {theirs[name] or 'is missing'}, and {mine[name]} in this kernel"
            for name in ("python", "torch", "torch_xla")
            if theirs[name].partition("+")[0] != mine[name].partition("+")[0]
        ]
        if differ:
            self.run.emit(Note(f"the session has other versions: {'; '.join(differ)}"))

    def _bundle(self, variables: Mapping[str, str]) -> bytes:
        """Pack the run folder and variables, tpunb, and the files to copy into an archive."""
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
        """Return the first message of a cell. Raises ColabError and Cancelled."""
        deadline = time.monotonic() + patience
        while (said := cell.next(POLL_INTERVAL)) is None:
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
                        # Ends an earlier follower that may still occupy the kernel.
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
                yield Said(0, ConnectionLost(lost, final=True))
                return
            if tries == len(AGAIN):
                goes_on = (
                    f"; session {self._name} may still be running, and cost money: `tpunb attach "
                    f"{self.run.id}` follows it again, `colab stop -s {self._name}` ends it"
                )
                yield Said(0, ConnectionLost(f"{problem}{goes_on * self.placed.detached}"))
                return
            due = time.monotonic() + AGAIN[tries]
            tries += 1
            while time.monotonic() < due:
                time.sleep(POLL_INTERVAL)
                yield None

    def _why_lost(self) -> str:
        """Why the run cannot be followed any more; '' if the session exists or may exist."""
        try:
            if self._is_there():
                return ""
        except ColabError:
            return ""
        return f"Colab has ended the session: `colab sessions` does not list {self._name} any more"

    def _is_there(self) -> bool:
        """True if the session is allocated. Raises ColabError."""
        own = (self._name, self.placed.endpoint)
        return any(own[0] == each.name or own[1] == each.endpoint for each in self._tool.sessions())

    def stop(self, request: Stop) -> None:
        if self._gone:
            return
        self._stops += 1
        threading.Thread(target=self._pass_on, args=(request, self._stops)).start()

    def _pass_on(self, request: Stop, number: int) -> None:
        """Upload a stop request; in a thread, because an upload takes seconds."""
        for left in reversed(range(TRIES)):
            try:
                self._upload(stream.encode(request), f"stop-{os.getpid()}-{number}.json")
                return
            except ColabError as error:
                if not left and not self._gone:
                    text = (
                        f"the stop request did not reach the session: {error}. "
                        f"`colab stop -s {self._name}` ends the session, and the run with it"
                    )
                    self.run.emit(Note(text))
            time.sleep(1.0)

    def release_lifelines(self) -> None:
        """Do nothing: a stop request was sent, and no connection keeps the run alive."""

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
        """Raises ColabError if the session does not exist any more, and HostsError."""
        name = f"pack-{secrets.token_hex(4)}"
        order = {"name": name, "patterns": list(patterns)}
        if not self._ended and not self._is_there():
            raise ColabError(
                f"session {self._name} was released: its run's files were fetched at the end of "
                f"the run, and are in {self.run.path}"
            )
        with tempfile.TemporaryDirectory(dir=into) as folder:
            if self.run.is_running() and not self._ended:
                # The run's mirror follows it, and occupies the kernel.
                self._upload((json.dumps(order) + "\n").encode(), f"{name}.json")
                made = self._wait_for_parts(name, Path(folder, "parts.json"))
            else:
                cell = _Cell(self._tool, self._name, "packed", order)
                try:
                    made = self._answer(cell, PACKING)
                finally:
                    cell.close()
            if made.get("error"):
                problem = (HOST, str(made["error"]))
                raise HostsError(self.placed.place.name, (problem,), "nothing was fetched")
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
                    problem = (HOST, f"its archive cannot be read: {error}")
                    raise HostsError(
                        self.placed.place.name, (problem,), "not all files were fetched"
                    ) from None

    def _wait_for_parts(self, name: str, file: Path) -> dict[str, Any]:
        """Wait for `pack` in the session; return its `parts.json`. Raises ColabError."""
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
                    f"{self._name} stays allocated, and costs money: run `tpunb fetch "
                    f"{self.run.id} {wanted}`, then `colab stop -s {self._name}`"
                )
                return
        if self._settings.keep:
            say(
                f"session {self._name} stays allocated, and costs money: `colab stop -s "
                f"{self._name}` ends it"
            )
            return
        if kept := self._release():
            say(kept.lstrip("; "))

    def _release(self) -> str:
        """Release the session; return '' if that is certain, otherwise a warning for the user."""
        try:
            self._tool.stop(self._name)
            if not self._is_there():
                self._gone = True
                return ""
            why = "`colab sessions` still lists it"
        except ColabError as error:
            why = str(error)
        return (
            f"; session {self._name} could not be released ({why}), and may still cost money: run "
            f"`colab stop -s {self._name}`, or end it at https://colab.research.google.com "
            "(Runtime > Manage sessions)"
        )

    def _nameless(self) -> str:
        """Warning about a session without a name after a failed allocation; '' if there is none.

        Colab may have allocated a session whose name `colab` did not record any more.
        """
        with contextlib.suppress(ColabError):
            if any(session.name == "?" for session in self._tool.sessions()):
                return (
                    "; your account has a session for which `colab` has no name. It may be from "
                    "this attempt, and cost money: check it at https://colab.research.google.com "
                    "(Runtime > Manage sessions)"
                )
        return ""


class _Cell:
    """A cell in the session's kernel, run by `colab exec`, and its messages."""

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
        """True if no more messages can come."""
        self.said_last = False
        """True if the cell has sent its last message, and ends by itself."""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        lines = LineBuffer(_LONGEST)
        mark = colab_session.MARK.encode()
        while True:
            try:
                data = os.read(self._process.output.fileno(), 1 << 18)
            except (OSError, ValueError):  # closed by this process
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
        """The next message; None if there is none within `timeout` seconds, or none any more."""
        try:
            said = None if self.over else self._said.get(timeout=timeout)
        except queue.Empty:
            return None
        self.over = said is None
        return said

    def reason(self) -> str:
        """The last line of `colab exec`'s output, as the reason for its end."""
        told = last_words(self._process.errors()) or last_words(self._last)
        return told or "`colab exec` has ended without a message"

    def close(self) -> None:
        """End `colab exec`, even if the cell is still running."""
        if not self.over and not self.said_last:
            end(self._process.pid, self._process.wait)
        else:
            self._process.wait(ENDING)
        self._process.close()


class _Turn:
    """Reads the stream from one cell that follows the run, and finds out how the cell ended."""

    def __init__(self, cell: _Cell) -> None:
        self.cell = cell
        self.ended = False
        """True if the run has ended, and its stream is complete."""
        self.again = False
        """True if the cell reached its limit while the run is still running."""
        self.problem = ""
        """Why the cell has ended in another way."""
        self.large: list[str] = []

    def lines(self) -> Iterator[Line | None]:
        """Yield lines of the stream; None while there is none."""
        reader = stream.StreamReader(_LONGEST)
        number, heard, last = 0, time.monotonic(), False
        while True:
            said = self.cell.next(POLL_INTERVAL)
            if said is None:
                if self.cell.over:
                    self.problem = self.cell.reason()
                    return
                patience = SILENT if number else FIRST
                if time.monotonic() - heard > patience:
                    self.problem = f"no message from the session for {patience:g} s"
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
                self.problem = "" if last else "the run's stream has ended too early"
                return
            if said.get("number") != number:
                self.problem = "a message of the session is missing"
                return
            number += 1
            for line in reader.feed(zlib.decompress(b64decode(said["data"]))):
                if not isinstance(line, str):
                    last = last or isinstance(line, End)
                    yield line


# tpunb doctor --on


@dataclass(frozen=True)
class ColabReport:
    """The report of `tpunb doctor --on` about Colab."""

    place: PlaceConfig
    tool: str | None
    """The path of `colab`; None if it is not installed."""
    version: str
    sessions: Sequence[Session]
    usage: Usage | None
    problem: str
    """Why the account cannot be used; '' if it can."""

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
            lines.append(f"{self.tool}, {self.version or 'unknown version'}")
        if self.problem:
            return "\n".join([*lines, f"problem: {self.problem}"])
        lines += [f"session {each.name}: {each.hardware}" for each in self.sessions]
        if not self.sessions:
            lines.append("no session is allocated")
        if self.usage is not None:
            lines.append(
                f"{self.usage.balance:.2f} {UNITS} left; current use: {self.usage.rate:.2f} an hour"
            )
        accelerator = place.settings_as(ColabSettings).accelerator
        return "\n".join([*lines, f"ready: %%tpu_train --on {place.name} requests {accelerator}"])


def inspect_colab(place: PlaceConfig) -> ColabReport:
    """Check the installation and login of `colab`, and list the account's sessions."""
    tool = ColabTool(place.settings_as(ColabSettings).auth)
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
"""Functions of `kind = "colab"`."""
