"""Kaggle's notebooks, in its stand-in: what is pushed runs for real, in a process here.

Requests and answers are those of kagglesdk 0.1.38 (`kernels.KernelsApiService`) and kaggle 2.2.5.
As Kaggle does, a session runs the pushed notebook with papermill; its log has what the cells print.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slugify import slugify

from tests.fakes.kaggle_server import SECRET, STORE, FakeKaggle, Stored
from tpunb.utils import processes

_SERVICE = "kernels.KernelsApiService/"
_SOURCES = {
    "datasetDataSources": "invalidDatasetSources",
    "competitionDataSources": "invalidCompetitionSources",
    "modelDataSources": "invalidModelSources",
}


@dataclass
class Session:
    """A pushed notebook, and its run."""

    ref: str
    asked: dict[str, Any]
    folder: Path
    status: str = "QUEUED"
    failure: str = ""
    log: str = ""
    process: subprocess.Popen[bytes] | None = None
    thread: threading.Thread | None = None

    @property
    def work(self) -> Path:
        """Its /kaggle/working: what is in it at the end is its output."""
        return self.folder / "working"

    @property
    def code(self) -> Path:
        return self.folder / "notebook.ipynb"

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
        """The notebooks, by 'owner/slug'."""
        self.most_sessions = 2
        self.hold = threading.Event()
        """While it is clear, sessions stay in the queue."""
        self.hold.set()
        self.trouble: dict[str, list[int]] = {}
        """Statuses with which a method answers next, by its name; 0 closes the connection."""
        self.closing = False

    def __exit__(self, *exception: Any) -> None:
        self.closing = True
        self.hold.set()
        for session in self.sessions.values():
            self.kill(session)
            assert session.thread is not None
            session.thread.join()
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
            return self.trouble[name].pop(0), {"code": 503, "message": "Backend error"}
        if not method.startswith(_SERVICE):
            return super().answer(method, asked, login)
        self.asked.append((name, asked))
        if login != self.login:
            return 401, {"code": 401, "message": "Unauthenticated"}
        if name == "SaveKernel":
            return 200, self._save(asked)
        session = self.sessions.get(f"{asked.get('userName')}/{asked.get('kernelSlug')}")
        if session is None:  # also of one that may not be read: nobody is told which it is
            return 403, {"code": 403, "message": "Permission 'kernels.get' was denied"}
        match name:
            case "GetKernelSessionStatus":
                return 200, {"status": session.status, "failureMessage": session.failure}
            case "ListKernelSessionOutput":
                return 200, self._outputs(session, asked)
            case "GetKernel":
                slug = session.ref.partition("/")[2]
                blob = {"source": session.code.read_text(encoding="utf-8"), "slug": slug}
                return 200, {"blob": {**blob, "language": "python", "kernelType": "notebook"}}
        return 404, {"code": 404, "message": "Not found"}

    def _save(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What SaveKernel answers: an error is in a successful answer."""
        owner, title = asked["slug"].partition("/")[0], asked.get("newTitle", "")
        if owner != self.username:
            return {"error": "Permission 'kernels.update' was denied"}
        ref = f"{owner}/{slugify(title)}"  # made from the title, whatever was asked for
        if sum(not each.over for each in self.sessions.values()) >= self.most_sessions:
            return {"error": f"Maximum batch TPU session count of {self.most_sessions} reached."}
        url = f"https://www.kaggle.com/code/{ref}"
        answer: dict[str, Any] = {"ref": f"/code/{ref}", "url": url, "versionNumber": 1}
        for sources, invalid in _SOURCES.items():
            kind = sources.removesuffix("DataSources")
            answer[invalid] = [
                each
                for each in asked.get(sources, [])
                if not any(f"{name}/".startswith(f"{kind}s/{each}/") for name in self.files)
            ]
        session = self.sessions[ref] = Session(ref, asked, self.folder / str(len(self.sessions)))
        session.work.mkdir(parents=True)
        session.code.write_text(asked["text"], encoding="utf-8")
        session.thread = threading.Thread(target=self._run, args=[session])
        session.thread.start()
        return answer

    def _outputs(self, session: Session, asked: dict[str, Any]) -> dict[str, Any]:
        """A page of the files of a session that has ended; they are at another host."""
        names = []
        if session.over:
            files = (path for path in sorted(session.work.rglob("*")) if path.is_file())
            names = [path.relative_to(session.work).as_posix() for path in files]
        start, size = int(asked.get("pageToken") or 0), asked["pageSize"]
        listed = []
        for name in names[start : start + size]:
            path = f"outputs/{session.ref}/{name}"
            self.files.setdefault(path, Stored((session.work / name).read_bytes()))
            listed.append({"url": f"http://{STORE}/{path}?{SECRET}", "fileName": name})
        more = start + size < len(names)
        event = {"stream_name": "stdout", "time": 0.1, "data": session.log}
        return {
            "files": listed,
            "log": json.dumps([event]) if session.over else "",
            "nextPageToken": str(start + size) if more else "",
        }

    # Running

    def _run(self, session: Session) -> None:
        self.hold.wait()
        if self.closing:
            session.status = "ERROR"
            return
        command = ["-m", "papermill", str(session.code), str(session.code), "--log-output"]
        session.process = subprocess.Popen(
            [sys.executable, *command, "--no-progress-bar"],
            cwd=session.work,
            env=self._session_environment(session),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        session.status = "RUNNING"
        try:
            seconds = session.asked.get("sessionTimeoutSeconds")
            output, _ = session.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill(session)
            output, _ = session.process.communicate()
        session.log = output.decode("utf-8", "replace")
        failed = session.process.returncode != 0
        session.failure = "Your notebook failed." if failed else ""
        session.status = "ERROR" if failed else "COMPLETE"

    def _session_environment(self, session: Session) -> dict[str, str]:
        """As a session of Kaggle has it: nothing of whoever has pushed."""
        home = session.folder / "home"
        home.mkdir()
        kept = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
        own = {**kept, **self.environ, **self.notebook_environ, "HOME": str(home)}
        return {**own, **self.environment}
