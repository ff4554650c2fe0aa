"""Kaggle's notebooks, in its stand-in: what is pushed runs for real, in a process here.

Requests and answers are those of kagglesdk 0.1.37 (`kernels.KernelsApiService`) and kaggle 2.2.4,
whose log stream is server-sent events while a session runs and a JSON array afterwards. As Kaggle
does, a session runs the pushed notebook with papermill; its log has what the cells print.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import IO, Any

from slugify import slugify

from tests.fakes.kaggle_server import SECRET, STORE, FakeKaggle, Stored
from tpunb.utils import processes

STREAM = "/api/v1/kernels/logs/stream/"
_SERVICE = "kernels.KernelsApiService/"
_SOURCES = {
    "datasetDataSources": "invalidDatasetSources",
    "competitionDataSources": "invalidCompetitionSources",
    "kernelDataSources": "invalidKernelSources",
    "modelDataSources": "invalidModelSources",
}
_PAPERMILL = """
import sys, papermill
out, err = (open(int(fd), "w", buffering=1) for fd in sys.argv[1:3])
papermill.execute_notebook(
    sys.argv[3], sys.argv[4], stdout_file=out, stderr_file=err, progress_bar=False
)
"""
_WITHOUT_XLA = """
import importlib.metadata
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.split(".")[0] == "torch_xla" else find(name, path, target)
PathFinder.find_spec = find_spec
found = importlib.metadata.version
def version(name):
    if name == "torch_xla":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.version = version
"""


@dataclass
class Session:
    """One version of a notebook, and its run."""

    ref: str
    asked: dict[str, Any]
    folder: Path
    status: str = "QUEUED"
    failure: str = ""
    log: list[dict[str, Any]] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    threads: list[threading.Thread] = field(default_factory=list)
    streamed: int = 0
    """How often its log was asked for while it ran."""

    @property
    def work(self) -> Path:
        """Its /kaggle/working: what is in it at the end is its output."""
        return self.folder / "working"

    @property
    def over(self) -> bool:
        return self.status in ("COMPLETE", "ERROR", "CANCEL_ACKNOWLEDGED")


class FakeKaggleKernels(FakeKaggle):
    """Kaggle with notebooks, as a context."""

    def __init__(self, folder: Path, **login: str) -> None:
        """`folder`: where sessions have their files."""
        super().__init__(**login)
        self.folder = folder
        self.environment: dict[str, str] = {}
        """Of sessions, besides PATH and Kaggle's own."""
        self.sessions: dict[str, Session] = {}
        """The last of each notebook, by 'owner/slug'."""
        self.most_sessions = 2
        self.hold = threading.Event()
        """While it is clear, sessions stay in the queue."""
        self.hold.set()
        self.used, self.allowed = 3600, 72000
        """Seconds of TPU of this week."""
        self.cut_after: list[int] = []
        """After so many events the log's connection is lost; for the next streams, one each."""
        self.trouble: dict[str, list[int]] = {}
        """Statuses with which a method answers next, by its name; 0 closes the connection,
        -1 is no answer at all."""
        self.without_xla = False
        """Whether sessions have the image of those without a TPU, as a pinned one makes them."""
        self.lose_answer = False
        """Whether the connection is lost once a notebook is saved, before anybody is told."""
        self.too_early = 0
        """How often a session that has just ended is still said to be running."""
        self.hanging = 0
        """Requests that wait for an answer that does not come."""
        self.closing = threading.Event()

    def __exit__(self, *exception: Any) -> None:
        self.closing.set()
        self.hold.set()
        for session in self.sessions.values():
            self.kill(session)
            for thread in session.threads:
                thread.join()
        super().__exit__(*exception)

    @staticmethod
    def kill(session: Session) -> None:
        """End a session from outside, as Kaggle does at its time-out."""
        if session.process is not None:
            below = processes.descendants(session.process.pid)
            for pid in [session.process.pid, *(process.pid for process in below)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # Answers

    def answer(self, method: str, asked: dict[str, Any], login: str) -> tuple[int, Any]:
        name = method.removeprefix(_SERVICE)
        if self.trouble.get(name):
            status = self.trouble[name].pop(0)
            if status < 0:
                self.hanging += 1
                self.closing.wait()
            return max(0, status), {"code": 503, "message": "Backend error"}
        if method == "security.OAuthService/IntrospectToken":
            known = bool(self.token) and asked.get("token") == self.token
            return 200, {"active": known, "username": self.username if known else ""}
        if not method.startswith(_SERVICE):
            return super().answer(method, asked, login)
        self.asked.append((name, asked))
        if login not in (self.login, f"Bearer {self.token}" if self.token else self.login):
            return 401, {"code": 401, "message": "Unauthenticated"}
        match name:
            case "SaveKernel":
                answer = self._save(asked)
                return (0 if self.lose_answer else 200), answer
            case "GetAcceleratorQuotaStatistics":
                return 200, {
                    "quotaRefreshTime": "2026-11-28T00:00:00Z",
                    "tpuQuota": {
                        "timeUsed": f"{self.used}s",
                        "totalTimeAllowed": f"{self.allowed}s",
                    },
                }
        ref = f"{asked.get('userName')}/{asked.get('kernelSlug')}"
        session = self.sessions.get(ref)
        if session is None:  # also of one that may not be read: nobody is told which it is
            return 403, {"code": 403, "message": "Permission 'kernels.get' was denied"}
        match name:
            case "GetKernelSessionStatus":
                status = session.status
                if session.over and self.too_early > 0:
                    self.too_early, status = self.too_early - 1, "RUNNING"
                return 200, {"status": status, "failureMessage": session.failure}
            case "ListKernelSessionOutput":
                return 200, self._outputs(session, asked)
        return 404, {"code": 404, "message": "Not found"}

    def _save(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What SaveKernel answers: an error is in a successful answer."""
        owner, _, slug = asked["slug"].partition("/")
        title = asked.get("newTitle", "")
        if owner != self.username:
            return {"error": "Permission 'kernels.update' was denied"}
        if len(title) < 5:
            return {"error": "Title must be at least five characters"}
        # The address is made from the title, whatever was asked for.
        ref = (
            f"{owner}/{slugify(title)}" if f"{owner}/{slug}" not in self.sessions else asked["slug"]
        )
        tpu = asked.get("machineShape") == "TpuV5E8"
        running = [each for each in self.sessions.values() if not each.over]
        if len(running) >= self.most_sessions:
            return {"error": f"Maximum batch TPU session count of {self.most_sessions} reached."}
        if tpu and self.used >= self.allowed:
            return {"error": "Accelerator Quota Exceeded"}
        answer: dict[str, Any] = {
            "ref": f"/code/{ref}",
            "url": f"https://www.kaggle.com/code/{ref}",
            "versionNumber": 1,
        }
        for sources, invalid in _SOURCES.items():
            kind = sources.removesuffix("DataSources")
            known = set(self.files) | {f"kernels/{each}" for each in self.sessions}
            answer[invalid] = [
                each
                for each in asked.get(sources, [])
                if not any(f"{name}/".startswith(f"{kind}s/{each}/") for name in known)
            ]
        folder = self.folder / str(len(list(self.folder.glob("*"))) + 1)
        session = Session(ref, asked, folder)
        session.work.mkdir(parents=True)
        self.sessions[ref] = session
        thread = threading.Thread(target=self._run, args=[session])
        session.threads.append(thread)
        thread.start()
        return answer

    def _outputs(self, session: Session, asked: dict[str, Any]) -> dict[str, Any]:
        """A page of the files of a session that has ended; they are at another host."""
        names = []
        if session.over:
            files = (path for path in sorted(session.work.rglob("*")) if path.is_file())
            names = [path.relative_to(session.work).as_posix() for path in files]
        start, size = int(asked.get("pageToken") or 0), asked["pageSize"]
        listed = []
        for name in names[start : start + min(size, 200)]:
            path = f"outputs/{session.ref}/{name}"
            self.files.setdefault(path, Stored((session.work / name).read_bytes()))
            listed.append({"url": f"http://{STORE}/{path}?{SECRET}", "fileName": name})
        more = start + size < len(names)
        return {
            "files": listed,
            "log": json.dumps(session.log) if session.over else "",
            "nextPageToken": str(start + size) if more else "",
        }

    # Running

    def _run(self, session: Session) -> None:
        self.hold.wait()
        if self.closing.is_set():
            session.status = "ERROR"
            return
        began = time.monotonic()
        pipes = [os.pipe(), os.pipe()]
        command = self._command(session, [write for _, write in pipes])
        script = session.asked["kernelType"] == "script"
        with (session.folder / "runner.log").open("wb") as log:
            session.process = subprocess.Popen(
                command,
                cwd=session.work,
                env=self._session_environment(session),
                pass_fds=[write for _, write in pipes],
                stdin=subprocess.DEVNULL,
                stdout=pipes[0][1] if script else log,
                stderr=pipes[1][1] if script else log,
                start_new_session=True,
            )
        session.status = "RUNNING"
        readers = []
        for (read, write), name in zip(pipes, ("stdout", "stderr"), strict=True):
            os.close(write)
            reader = threading.Thread(target=self._read, args=(session, name, read, began))
            reader.start()
            readers.append(reader)
        try:
            code = session.process.wait(session.asked.get("sessionTimeoutSeconds"))
            session.failure = "" if code == 0 else "Your notebook failed."
        except subprocess.TimeoutExpired:
            session.failure = "Your notebook exceeded its time limit."
            code = 1
        if code:
            self.kill(session)
        session.process.wait()
        for reader in readers:
            reader.join()
        session.status = "COMPLETE" if code == 0 else "ERROR"

    def _command(self, session: Session, outputs: list[int]) -> list[str]:
        code = session.folder / "notebook.ipynb"
        code.write_text(session.asked["text"], encoding="utf-8")
        if session.asked["kernelType"] == "script":
            return [sys.executable, str(code)]
        words = [*map(str, outputs), str(code), str(session.folder / "executed.ipynb")]
        return [sys.executable, "-c", _PAPERMILL, *words]

    def _session_environment(self, session: Session) -> dict[str, str]:
        """As a session of Kaggle has it: nothing of whoever has pushed."""
        home = session.folder / "home"
        home.mkdir()
        inputs = session.folder / "input"
        inputs.mkdir()
        for source in session.asked.get("datasetDataSources", []):
            mount = inputs / self.mounts.get(f"datasets/{source}", "nowhere")
            mount.mkdir(parents=True, exist_ok=True)
            (mount / "mounted.csv").write_text("a,b\n")
        for source in session.asked.get("kernelDataSources", []):
            if (earlier := self.sessions.get(source)) is not None:
                (inputs / source.partition("/")[2]).symlink_to(earlier.work)
        kept = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
        own = {
            **kept,
            **self.environ,
            **self.notebook_environ,
            "HOME": str(home),
            "KAGGLE_CACHE_MOUNT_FOLDER": str(inputs),
            **self.environment,
        }
        if self.without_xla:
            # The image of a session without a TPU comes instead of that of a TPU VM.
            path = session.folder / "image"
            path.mkdir()
            (path / "sitecustomize.py").write_text(_WITHOUT_XLA)
            own["PYTHONPATH"] = f"{path}:{own.get('PYTHONPATH', '')}"
        return own

    def _read(self, session: Session, name: str, fd: int, began: float) -> None:
        with os.fdopen(fd, "rb", buffering=0) as pipe:
            while data := pipe.read(1 << 16):
                session.log.append(
                    {
                        "stream_name": name,
                        "time": round(time.monotonic() - began, 3),
                        "data": data.decode("utf-8", "replace"),
                    }
                )

    # The log

    def get(self, request: BaseHTTPRequestHandler, path: str) -> bool:
        """Answer what is asked with GET; False for what is not of notebooks."""
        if not path.startswith(STREAM):
            return False
        login = request.headers.get("Authorization", "")
        session = self.sessions.get(path.removeprefix(STREAM))
        self.asked.append(("logs", {"ref": path.removeprefix(STREAM)}))
        trouble = self.trouble.get("logs")
        status = 200
        if trouble:
            status = trouble.pop(0)
        elif session is None or login not in (self.login, f"Bearer {self.token}"):
            status = 403
        if status != 200 or session is None:
            request.send_response(status)
            request.send_header("Content-Length", "0")
            request.end_headers()
        elif session.over:
            body = json.dumps(session.log).encode()
            request.send_response(200)
            request.send_header("Content-Type", "application/json")
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)
        else:
            self._stream(request.wfile, request, session)
        return True

    def _stream(self, file: IO[bytes], request: BaseHTTPRequestHandler, session: Session) -> None:
        session.streamed += 1
        request.send_response(200)
        request.send_header("Content-Type", "text/event-stream")
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        request.close_connection = True

        def send(text: str) -> None:
            data = f"data: {text}\n\n".encode()
            file.write(b"%x\r\n%b\r\n" % (len(data), data))
            file.flush()

        most = self.cut_after.pop(0) if self.cut_after else None
        sent = 0
        with contextlib.suppress(ConnectionError):
            while not self.closing.is_set():
                over = session.over
                while sent < len(session.log):
                    if sent == most:
                        return
                    send(json.dumps(session.log[sent]))
                    sent += 1
                if over:
                    send("END_OF_LOG")
                    file.write(b"0\r\n\r\n")
                    return
                time.sleep(0.02)
