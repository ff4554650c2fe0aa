"""Runs a run inside a Kaggle session: called by the notebook that `kaggle_notebook` writes.

    notebook's kernel ── pipes ──> tpunb node --stream (as on a host of any place)
          └── stdout: the run's log, for people     stderr: the stream, packed (`log_stream`)

The run's mirror reads both from the session's log. After the run the notebook's output is its log
alone. Imports the standard library only, and IPython, which the kernel has.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import util
from pathlib import Path
from typing import Any, TextIO

from tpunb.places.log_stream import Packer, shown
from tpunb.runs import stream
from tpunb.runs.directory import RunDir
from tpunb.runs.stream import End, Line, Start
from tpunb.utils import env_vars
from tpunb.utils.files import PACKAGE_ROOT, LineBuffer

FOLDER = "tpunb-run"
"""The run folder, in the session's working directory: all of it becomes output."""
SCRIPT = "script.py"
ORDER = "session.json"
"""File next to the package with the values from `kaggle_notebook` for `run`."""
EARLIER = "kaggle-output:"
"""Prefix of 'owner/slug' of an earlier run whose checkpoints are an input of this run."""
INPUTS = "/kaggle/input"
ENDING = 600.0
"""Seconds before the session's time-out at which the run is stopped, so that it can save and its
output is kept: a session that is cut off keeps none. A sixth of the time, if that is less."""
POLL_INTERVAL = 0.5
MOST = 1_000_000
"""Characters of the log that the notebook keeps; the run folder has all of it."""
FAILURES = 3
"""Number of failures shown below the log."""


def bring(source: str, *words: str) -> None:
    """Run a line of `%tpu_data`: link the data that Kaggle has mounted to the run's folder."""
    _call("data", source, *words)


def run() -> None:
    """Run the run to its end. Raises RuntimeError if it cannot begin."""
    _Session(Path.cwd() / FOLDER, Path(PACKAGE_ROOT)).run()


class _Session:
    def __init__(self, folder: Path, sent: Path) -> None:
        self._folder = folder
        self._sent = sent
        self._packer = Packer()
        self._order: Mapping[str, Any] = json.loads((sent / ORDER).read_text(encoding="utf-8"))

    def run(self) -> None:
        try:
            self._prepare()
        except RuntimeError as error:
            self._packer.add(End(2, str(error)))
            self._write_due(last=True)
            raise
        end = self._follow(self._start())
        self._show(end)

    # Before

    def _prepare(self) -> None:
        """Set up the run folder, and check the session."""
        shutil.copytree(self._sent / "run", self._folder)
        Path(SCRIPT).replace(self._folder / SCRIPT)
        if (files := self._sent / "files").exists():
            shutil.copytree(files, Path.cwd(), dirs_exist_ok=True)
        self._limit()
        if util.find_spec("torch_xla") is None:
            machine = self._order["accelerator"] or "no accelerator"
            raise RuntimeError(
                f"this Kaggle session has no torch_xla, although {machine} was requested: its "
                "image is not that of a TPU session. Start the run again; if that does not help, "
                "check the notebook's accelerator and environment on its page"
            )

    def _limit(self) -> None:
        """Set the run's time-out so that it ends before Kaggle cuts the session off."""
        run = RunDir(self._folder)
        spec = json.loads(run.spec.read_text(encoding="utf-8"))
        seconds = float(self._order["seconds"])
        most = seconds - min(ENDING, seconds / 6)
        spec["timeout"] = min(most, spec.get("timeout") or most)
        run.spec.write_text(json.dumps(spec), encoding="utf-8")

    def _variables(self) -> dict[str, str]:
        variables = dict(self._order["variables"])
        earlier = variables.get(env_vars.RESUME, "")
        if earlier.startswith(EARLIER):
            variables[env_vars.RESUME] = _find_checkpoints(earlier.removeprefix(EARLIER))
        return variables

    # The run

    def _start(self) -> subprocess.Popen[bytes]:
        variables = self._variables()
        words = ["node", "--run", str(self._folder), "--nnodes", "1", "--node-rank", "0"]
        words += ["--rendezvous", "127.0.0.1:0", "--address", "127.0.0.1"]
        process = subprocess.Popen(
            [sys.executable, "-m", "tpunb", *words, "--key-file", "-", "--stream"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
        )
        assert process.stdin is not None
        # The pipe stays open: the run ends with this kernel.
        process.stdin.write(stream.encode(Start(secrets.token_hex(32), variables)))
        process.stdin.flush()
        return process

    def _follow(self, process: subprocess.Popen[bytes]) -> End:
        """Write the node's output until it has ended."""
        assert process.stdout is not None
        fd, lines = process.stdout.fileno(), LineBuffer()
        end: End | None = None
        while True:
            if select.select([fd], [], [], POLL_INTERVAL)[0]:
                if not (data := os.read(fd, 1 << 18)):
                    break
                for text in lines.feed(data):
                    line = self._take(text)
                    end = line if isinstance(line, End) else end
            self._write_due()
        code = process.wait()
        if end is None:
            end = End(code or 1, f"tpunb node has ended without a result (exit code {code})")
            self._packer.add(end)
        self._write_due(last=True)
        return end

    def _take(self, text: bytes) -> Line | None:
        """Take in a line of the node's output, and print what is for people."""
        try:
            line = stream.decode(text)
        except ValueError:  # printed by a library
            _write(sys.stdout, f"{text.decode('utf-8', 'replace')}\n")
            return None
        _write(sys.stdout, shown(line, RunDir(self._folder).log.name))
        self._packer.add(line)
        return line

    def _write_due(self, *, last: bool = False) -> None:
        if text := self._packer.due(last=last):
            _write(sys.stderr, text)

    # Afterwards

    def _show(self, end: End) -> None:
        """Replace the cell's output with the run's log."""
        from IPython.display import clear_output, display

        from tpunb.runs import state

        run = RunDir(self._folder)
        log = run.log.read_text(encoding="utf-8", errors="replace") if run.log.exists() else ""
        told, result = [end.message], state.read_result(run)
        if result is not None:
            why = f" ({result.reason})" if result.reason else ""
            name = state.read_spec(run).id
            told = [f"run {name} has ended: {result.state}{why}, after {result.duration:.1f} s"]
            told += [str(failure) for failure in result.failures[:FAILURES]]
        clear_output(wait=True)
        display({"text/plain": "\n".join([log[-MOST:].rstrip(), "", *told])}, raw=True)


def _write(file: TextIO, text: str) -> None:
    file.write(text)
    file.flush()


def _environment() -> dict[str, str]:
    """The environment in which the package that was sent is imported."""
    path = [PACKAGE_ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def _call(*words: str) -> None:
    """Run a command of tpunb. Raises RuntimeError."""
    done = subprocess.run(
        [sys.executable, "-m", "tpunb", *words],
        env=_environment(),
        capture_output=True,
        text=True,
    )
    _write(sys.stdout, done.stdout + done.stderr)
    if done.returncode:
        packer = Packer()
        message = done.stderr.strip().removeprefix("tpunb: ")
        packer.add(End(2, message))
        _write(sys.stderr, packer.due(last=True))
        raise RuntimeError(message)


def _find_checkpoints(ref: str) -> str:
    """Find an earlier run's checkpoints among the notebook's inputs. Raises RuntimeError."""
    inputs = Path(os.environ.get("KAGGLE_CACHE_MOUNT_FOLDER", INPUTS))
    owner, _, slug = ref.partition("/")
    # Kaggle has changed the folder of a notebook's output more than once.
    for pattern in (slug, f"*/{slug}", f"*/{owner}/{slug}"):
        for folder in inputs.glob(f"{pattern}/{FOLDER}/checkpoints"):
            return str(folder)
    raise RuntimeError(
        f"the notebook's inputs in {inputs} have no checkpoints of {ref}, from which this run "
        "continues: check that its output has them and is an input of this notebook"
    )
