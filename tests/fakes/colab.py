"""A stand-in for `colab` (google-colab-cli 0.7.5) whose sessions are kernels here. For tests.

`install` writes an executable `colab` into a folder to put first on PATH. It takes the options that
`colab_options.json` has, which were read from the real one's parser; what it prints, its exit
statuses and what fails how were seen with the real one in front of a Jupyter server: `exec` says 0
whatever the code does, `stop` of an unknown session as well, hidden files are refused, an error of
the service has the session's token in its address, and a connection that is cut says nothing.

A session is a folder, its kernel a process with an environment of its own, without tpunb: `home` is
its home, `content` what Colab calls /content.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fakes.scripts import SHEBANG

OPTIONS = json.loads(Path(__file__).with_name("colab_options.json").read_text())
MARK = "TPUNB_FAKE_COLAB_SESSION"
"""In the environment of every process of a session: `FOLDER/NAME`."""
TOKEN = "ya29.the-token-of-a-session"
_LOGIN = (
    "\nTo authorize colab-cli, visit this URL in any browser:\n\n"
    "  https://accounts.google.com/o/oauth2/auth?response_type=code&state=a-secret-state\n\n"
    "After approving, Google will display an authorization code.\n"
)
_RATES = {"NONE": 0.08, "V5E1": 1.76, "V6E1": 3.52}


class FakeColab:
    """The account, and the sessions that it has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def _state(self) -> Iterator[dict[str, Any]]:
        with open(self.folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = self._read()
            yield state
            # A command may be killed at any time.
            new = self.folder / "state.json.new"
            new.write_text(json.dumps(state))
            new.rename(self.folder / "state.json")

    def _read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        except FileNotFoundError:
            return {"sessions": {}, "faults": {}, "env": {}, "balance": 83.2}
        return found

    # For tests

    @property
    def sessions(self) -> dict[str, dict[str, Any]]:
        """Those that are allocated, by name."""
        found: dict[str, dict[str, Any]] = self._read()["sessions"]
        return found

    def fail(self, **faults: object) -> None:
        """What goes wrong from now on, by command; None takes it back.

        `login`: nobody is logged in; `new`: an HTTP status of the backend, or seconds that it
        takes; `upload`, `download`, `stop`, `usage`: an HTTP status; `exec`: 'silent', it hears
        nothing more, 'cut', it ends in the middle, or 'lost', the session is not found.
        """
        with self._state() as state:
            kept = {**state["faults"], **faults}
            state["faults"] = {name: how for name, how in kept.items() if how is not None}

    def put(self, **env: str) -> None:
        """Variables of sessions that start from now on."""
        with self._state() as state:
            state["env"].update(env)

    def lose(self, name: str) -> None:
        """Colab takes the machine back."""
        with self._state() as state:
            state["sessions"].pop(name, None)
        self._end(name)

    def content(self, name: str) -> Path:
        """What the session calls /content."""
        return self.folder / "sessions" / name / "root" / "content"

    def processes(self, name: str) -> list[int]:
        """Those of a session."""
        needle = f"{MARK}={self.folder}/{name}\0".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if needle in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def close(self) -> None:
        """End every session."""
        for name in list(self.sessions):
            self.lose(name)

    @property
    def calls(self) -> list[list[str]]:
        """The words of every call, in order."""
        log = self.folder / "calls.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def _end(self, name: str) -> None:
        deadline = time.monotonic() + 30
        while (left := self.processes(name)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        shutil.rmtree(self.folder / "sessions" / name, ignore_errors=True)

    # The command

    def main(self, words: list[str]) -> int:
        """`colab WORD…`."""
        with open(self.folder / "calls.jsonl", "a") as log:
            log.write(json.dumps(words) + "\n")
        chosen = _parser().parse_args(words)
        self._faults: dict[str, Any] = self._read()["faults"]
        command = chosen.command
        if "login" in self._faults and command not in ("version", "help"):
            sys.stderr.write(_LOGIN)
            print("Enter the authorization code: ", end="", flush=True)
            if not sys.stdin.readline():
                print("\nAborted.", file=sys.stderr)
            return 1
        call = getattr(self, f"_{command.replace('-', '_')}", None)
        if call is None:
            raise SystemExit(f"the stand-in has no `colab {command}`")
        status: int = call(chosen)
        return status

    def _broken(self, command: str, status: object, path: str) -> str:
        url = f"https://8080-m-s.us.prod.colab.dev/{path}?authuser=0&colab-runtime-proxy-token={TOKEN}"
        return f"{status} Server Error: Service Unavailable for url: {url}"

    def _version(self, chosen: argparse.Namespace) -> int:
        print("Version: 0.7.5")
        return 0

    def _usage(self, chosen: argparse.Namespace) -> int:
        if "usage" in self._faults:
            broken = self._broken("usage", self._faults["usage"], "tun/m/ccu-info")
            print(f"[colab] Warning: failed to fetch compute-unit info: {broken}", file=sys.stderr)
            return 1
        state = self._read()
        rate = sum(_RATES[each["accelerator"]] for each in state["sessions"].values())
        print(f"Current balance: {state['balance']:.2f} compute units")
        print(f"Usage rate: {rate:.2f}/hr\nActive assignments: {len(state['sessions'])}")
        return 0

    def _new(self, chosen: argparse.Namespace) -> int:
        name = chosen.session or uuid.uuid4().hex[:6]
        accelerator = {"v5e1": "V5E1"}.get(chosen.tpu.lower(), "V6E1") if chosen.tpu else "NONE"
        print(f"[colab] Creating session '{name}'...", flush=True)
        fault = self._faults.get("new")
        if fault == 412:
            print(
                "[colab] Allocation refused (precondition failed). This can mean too many active "
                "sessions, or a temporary usage or capacity limit for the requested runtime. Run "
                "`colab stop` to free up a session, wait and retry, or try a different "
                "accelerator.",
                file=sys.stderr,
            )
            return 1
        if fault == 400:
            print(
                f"[colab] Backend rejected accelerator '{accelerator}'. You may not have quota or "
                "entitlement for this accelerator on your account. Try a different one (e.g. "
                "--gpu T4) or omit --gpu/--tpu for a CPU runtime.",
                file=sys.stderr,
            )
            return 1
        if fault == 503:
            print(
                "Traceback (most recent call last):\n  …\nColabRequestError: Failed to issue "
                "request POST https://colab.research.google.com/tun/m/assign?nbh=6f: Service "
                "Unavailable",
                file=sys.stderr,
            )
            return 1
        if fault is not None:
            time.sleep(float(fault))
        with self._state() as state:
            state["sessions"][name] = {"endpoint": f"m-s-{name}", "accelerator": accelerator}
        self.content(name).mkdir(parents=True)
        print("[colab] Session READY.")
        return 0

    def _sessions(self, chosen: argparse.Namespace) -> int:
        for name, session in self.sessions.items():
            variant = "DEFAULT" if session["accelerator"] == "NONE" else "TPU"
            hardware = session["accelerator"].replace("NONE", "CPU")
            print(
                f"[{name}] {session['endpoint']} | Hardware: {hardware} | Shape: Standard | "
                f"Variant: {variant}"
            )
        if not self.sessions:
            print("[colab] No active sessions found on server.")
        return 0

    def _stop(self, chosen: argparse.Namespace) -> int:
        name = chosen.session
        if name not in self.sessions:
            print(f"[colab] Session '{name}' not found.")
            return 0
        print(f"[colab] Stopping session '{name}'...")
        if "stop" in self._faults:
            broken = self._broken("stop", self._faults["stop"], "tun/m/unassign")
            print(f"Traceback (most recent call last):\n  …\n{broken}", file=sys.stderr)
            return 1
        self.lose(name)
        print("[colab] Session terminated.")
        return 0

    def _missing(self, name: str) -> bool:
        if name in self.sessions:
            return False
        print(f"[colab] Session '{name}' not found.")
        return True

    def _path(self, name: str, remote: str) -> Path:
        return self.content(name).parent / remote.strip("/")

    def _upload(self, chosen: argparse.Namespace) -> int:
        if self._missing(chosen.session):
            return 1
        if not os.path.isfile(chosen.local_path):
            print(f"[colab] Local file '{chosen.local_path}' not found.")
            return 1
        target = self._path(chosen.session, chosen.remote_path)
        status = self._faults.get("upload")
        if any(part.startswith(".") for part in chosen.remote_path.split("/")):
            status = 400
        elif not target.parent.is_dir():
            status = 500
        if status is not None:
            broken = self._broken("upload", status, f"api/contents/{chosen.remote_path}")
            print(f"[colab] Upload failed: {broken}")
            return 1
        target.write_bytes(Path(chosen.local_path).read_bytes())
        print(f"[colab] Uploaded '{chosen.local_path}' to '{chosen.remote_path}'")
        return 0

    def _download(self, chosen: argparse.Namespace) -> int:
        if self._missing(chosen.session):
            return 1
        source = self._path(chosen.session, chosen.remote_path)
        problem = ""
        if "download" in self._faults:
            path = f"api/contents/{chosen.remote_path}"
            problem = self._broken("download", self._faults["download"], path)
        elif source.is_dir():
            problem = f"Cannot download a directory: {chosen.remote_path}"
        elif not source.exists() or "/." in f"/{chosen.remote_path}":
            problem = f"File or directory not found: {chosen.remote_path}"
        if problem:
            print(f"[colab] Download failed: {problem}")
            return 1
        data = base64.b64encode(source.read_bytes())  # what travels, as JSON
        Path(chosen.local_path).write_bytes(base64.b64decode(data))
        print(f"[colab] Downloaded '{chosen.remote_path}' to '{chosen.local_path}'")
        return 0

    def _exec(self, chosen: argparse.Namespace) -> int:
        name = chosen.session
        if self._missing(name):
            return 1
        code = Path(chosen.file).read_text() if chosen.file else sys.stdin.read()
        if self._faults.get("exec") == "lost":
            print(f"[colab] Session '{name}' appears to be lost (404/401). Cleaning up.")
            return 1
        client = self._client(name)
        try:
            return self._execute(client, name, code)
        finally:
            client.stop_channels()

    def _execute(self, client: Any, name: str, code: str) -> int:
        client.execute(f"import os; os.chdir({str(self.content(name))!r})", reply=True)
        asked = client.execute(code)
        while True:
            fault = self._read()["faults"].get("exec")
            if fault == "cut":
                print("Traceback (most recent call last):\n  …\nRuntimeError: Connection was lost.")
                return 1
            try:
                message = client.get_iopub_msg(timeout=0.2)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != asked or fault == "silent":
                continue
            content = message["content"]
            match message["header"]["msg_type"]:
                case "stream":
                    stream = sys.stderr if content["name"] == "stderr" else sys.stdout
                    stream.write(content["text"])
                    stream.flush()
                case "error":
                    sys.stderr.write("".join(content["traceback"]) + "\n")
                case "status" if content["execution_state"] == "idle":
                    return 0

    def _python(self, name: str) -> str:
        """An interpreter of the session's own."""
        made = self.folder / "python"
        with open(self.folder / "making", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                make_python(self.folder / "new-python")
                (self.folder / "new-python").rename(made)
        own = self.content(name).parents[1] / "python"
        shutil.copytree(made, own, symlinks=True, copy_function=os.link)
        return str(own / "bin" / "python")

    def _client(self, name: str) -> Any:
        """Connected to the session's kernel, which the first one starts."""
        from jupyter_client.blocking.client import BlockingKernelClient
        from jupyter_client.connect import write_connection_file

        file = self.content(name).parents[1] / "kernel.json"
        if not file.exists():
            made, _ = write_connection_file(str(file))
            home = self.content(name).parent / "home"
            home.mkdir(exist_ok=True)
            # Not the account's home, and no variable of who calls.
            kept = ("LANG", "TPUNB_TEST")
            env = {key: os.environ[key] for key in kept if key in os.environ}
            env |= {
                "HOME": str(home),
                "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
                "UV_OFFLINE": "1",
                **self._read()["env"],
                MARK: f"{self.folder}/{name}",
            }
            python = self._python(name)
            with open(self.content(name).parents[1] / "kernel.log", "ab") as log:
                subprocess.Popen(
                    [python, "-m", "ipykernel_launcher", "-f", made],
                    env=env,
                    cwd=self.content(name),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        client = BlockingKernelClient(connection_file=str(file))
        client.load_connection_file()
        client.start_channels(hb=False)  # a kernel that starts has no heart yet
        client.wait_for_ready(timeout=60)
        return client


def make_python(folder: Path) -> None:
    """An interpreter with the packages of this one, except tpunb: links, made in no time."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (own,) = folder.glob("lib/python3*/site-packages")
    for source in map(Path, sys.path):
        if source.name != "site-packages":
            continue
        for entry in source.iterdir():
            if "tpunb" in entry.name or (own / entry.name).exists():
                continue
            if entry.name.endswith(".dist-info"):  # uv sees none that is a link
                shutil.copytree(entry, own / entry.name)
            else:
                (own / entry.name).symlink_to(entry)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("colab", allow_abbrev=False)
    _add(parser, OPTIONS[""])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, options in OPTIONS.items():
        if name:
            _add(commands.add_parser(name, allow_abbrev=False), options)
    return parser


def _add(parser: argparse.ArgumentParser, options: list[str]) -> None:
    """'-s/--session=' takes a value, '--keep' none, 'path' must be there, '?path' may be."""
    for option in options:
        names = option.removesuffix("=").split("/")
        if not option.startswith("-"):
            many: dict[str, Any] = {"nargs": "?"} if option.startswith("?") else {}
            parser.add_argument(option.removeprefix("?"), **many)
        elif option.endswith("="):
            several = "append" if option == "--env=" else "store"
            parser.add_argument(*names, action=several)
        else:
            parser.add_argument(*names, action="store_true")


def install(folder: Path) -> FakeColab:
    """Write the executable."""
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).resolve().parents[2]
    script = folder / "colab"
    script.write_text(
        f"{SHEBANG}\n"
        f"import sys; sys.path.insert(0, {str(root)!r})\n"
        "from pathlib import Path\n"
        "from tests.fakes.colab import FakeColab\n"
        f"sys.exit(FakeColab(Path({str(folder)!r})).main(sys.argv[1:]))\n"
    )
    script.chmod(0o755)
    return FakeColab(folder)
