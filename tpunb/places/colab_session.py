"""Functions for a Colab session: sent to it as text, and run in its kernel by `colab exec`.

Each message is a line that begins with `MARK`. Paths are relative to the kernel's working
directory, which `colab exec` has set to /content, the folder of uploads and downloads; files whose
names begin with a dot are refused there. Imports the standard library only.

    begin    install tpunb, start `tpunb node`, which outlives the kernel's cell, and follow
    follow   send the run folder's stream; a kernel runs one cell at a time, so requests in the
             meantime (stops, files to pack, another follower) arrive as files in the folder
    packed   pack files of the run folder, in parts that `colab download` can fetch
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import platform
import select
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import zlib
from importlib import metadata
from typing import Any

MARK = "tpunb-colab: "
ALIVE = 10.0
"""Seconds of silence after which an empty message is sent."""
RATE = 500_000
"""Most bytes per second: a Jupyter server drops output faster than 1 MB per second."""
MOST = 16_000_000
"""Most bytes printed by a cell: `colab` keeps all of them in memory, and in its history."""
PART = 32_000_000
"""Bytes of a download, which Jupyter reads into memory as a whole."""
SMALL = 400_000
"""Most bytes of files that are sent in a message instead of downloaded."""
LARGE = ("checkpoints", "profile")
"""Folders of a run that no stream contains; `returns` is the third."""
TAIL = 2000
"""Bytes shown from the end of a failed command's output."""


def say(**values: object) -> None:
    """Print a message for the mirror."""
    print(MARK + json.dumps(values), flush=True)


def versions() -> dict[str, str]:
    """Versions of Python, torch and torch_xla; '' for a package that is not installed."""
    found = {"python": platform.python_version()}
    for package in ("torch", "torch_xla"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = ""
    return found


def begin(folder: str, packages: list[str], wheel: str, follower: str, seconds: float) -> None:
    """Install the uploaded package, start the run, and follow it; first say `hello` or `error`."""
    os.umask(0o077)
    here = versions()
    missing = [package for package, version in here.items() if not version]
    if missing and not packages:
        say(versions=here, missing=missing)
        return
    content = os.getcwd()
    os.makedirs(folder, exist_ok=True)
    folder = os.path.abspath(folder)
    run = os.path.join(folder, "run")
    with tarfile.open(f"{folder}.tar") as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    start = os.path.join(folder, "start.json")
    with open(start, "rb") as file:
        first = file.read()
    os.unlink(start)  # it may contain secrets, and so may its archive
    os.unlink(f"{folder}.tar")
    files = os.path.join(folder, "files")
    if os.path.isdir(files):
        shutil.copytree(files, content, dirs_exist_ok=True)
    problem = install([*packages, os.path.join(folder, wheel)])
    if problem:
        say(versions=here, error=f"the packages cannot be installed: {problem}")
        return
    with open(os.path.join(run, "spec.json"), encoding="utf-8") as file:
        spec = json.load(file)
    spec["cwd"] = os.path.normpath(os.path.join(content, spec["cwd"]))
    os.makedirs(spec["cwd"], exist_ok=True)
    with open(os.path.join(run, "spec.json"), "w", encoding="utf-8") as file:
        json.dump(spec, file)
    node = [
        sys.executable, "-m", "tpunb", "node", "--run", run, "--nnodes", "1", "--node-rank", "0",
        "--key-file", "-", "--stream", "--detach",
    ]  # fmt: skip
    done = subprocess.run(node, input=first, capture_output=True, cwd="/", check=False)
    lines = node_lines(done.stdout.decode("utf-8", "replace"))
    if done.returncode or "hello" not in lines:
        message = str(json.loads(lines.get("end", "{}")).get("message", ""))
        errors = done.stderr.decode("utf-8", "replace").strip()[-TAIL:]
        say(versions=here, error=message or errors or f"exit code {done.returncode}")
        return
    say(versions=versions(), hello=lines["hello"])
    follow(folder, {}, follower, seconds)


def node_lines(output: str) -> dict[str, str]:
    """The lines of `tpunb node`, keyed by kind, without lines printed by libraries."""
    found = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            found[str(json.loads(line)["kind"])] = line
    return found


def install(packages: list[str]) -> str:
    """Install packages, with uv if available, which is faster; return the error, or ''."""
    uv = shutil.which("uv")
    command = [uv, "pip", "install", "--quiet", "--python", sys.executable]
    if uv is None:
        command = [sys.executable, "-m", "pip", "install", "--quiet"]
    done = subprocess.run(
        [*map(str, command), *packages],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "NO_COLOR": "1"},
        check=False,
    )
    if not done.returncode:
        return ""
    return (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-TAIL:] or "no message"


def follow(folder: str, since: dict[str, int], follower: str, seconds: float) -> None:
    """Send the run folder's stream from the offsets `since` on, until the run has ended.

    Ends earlier after `seconds`, after `MOST` bytes, or when another follower's name is in the
    folder. The last message has `over`: True if the run has ended.
    """
    folder = os.path.abspath(folder)
    run = os.path.join(folder, "run")
    if not os.path.exists(os.path.join(run, "spec.json")):
        say(over=True, error="the run was never started in this session")
        return
    node = [
        sys.executable, "-m", "tpunb", "node", "--run", run, "--follow", "--since", "-",
        "--stream",
    ]  # fmt: skip
    with open(os.path.join(folder, "follower.txt"), "w", encoding="utf-8") as file:
        file.write(follower)
    process: Any = subprocess.Popen(
        node,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    try:
        tell(process, json.dumps(since))
        over = pass_on(folder, process, follower, seconds)
    finally:
        process.stdin.close()
        process.kill()  # it only reads
        process.wait()
        process.stdout.close()
    large = [name for name in LARGE if there(run, name)]
    say(over=over, large=large)


def there(run: str, name: str) -> bool:
    """True if the run folder has a file or a non-empty folder of this name."""
    path = os.path.join(run, name)
    return bool(os.listdir(path)) if os.path.isdir(path) else os.path.exists(path)


def tell(process: Any, line: str) -> None:
    """Send a line to `tpunb node`, if it is still running."""
    with contextlib.suppress(OSError):
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()


def pass_on(folder: str, process: Any, follower: str, seconds: float) -> bool:
    """Pass messages between `tpunb node` and the mirror; return True if the run has ended."""
    waiting = bytearray()
    said = begun = time.monotonic()
    number = total = 0
    while True:
        if select.select([process.stdout], [], [], 0.2)[0]:
            data = os.read(process.stdout.fileno(), 1 << 18)
            if not data:
                return True
            waiting += data
        cut = waiting.rfind(b"\n") + 1
        now = time.monotonic()
        if cut or now - said > ALIVE:
            text = base64.b64encode(zlib.compress(bytes(waiting[:cut]))).decode()
            del waiting[:cut]
            say(number=number, data=text)
            number, total, said = number + 1, total + len(text), now
            time.sleep(max(0.1, len(text) / RATE))
        take_requests(folder, process)
        if now - begun > seconds or total > MOST or not is_wanted(folder, follower):
            return False


def is_wanted(folder: str, follower: str) -> bool:
    """True if no other follower has taken over."""
    with open(os.path.join(folder, "follower.txt"), encoding="utf-8") as file:
        return file.read() in (follower, "")  # '' while it is being written


def take_requests(folder: str, process: Any) -> None:
    """Carry out requests in files: `stop-…` has a line for the run, `pack-…` the files to pack."""
    for name in sorted(os.listdir(folder)):
        if not name.startswith(("stop-", "pack-")) or not name.endswith(".json"):
            continue
        path = os.path.join(folder, name)
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if not text.endswith("\n"):
            continue  # still being uploaded
        os.unlink(path)
        if name.startswith("stop-"):
            tell(process, text.strip())
        else:
            # In a thread: packing checkpoints may take longer than the mirror's time-out.
            order = json.loads(text)
            threading.Thread(target=pack, args=(folder,), kwargs=order, daemon=True).start()


def packed(folder: str, name: str, patterns: list[str]) -> None:
    """Pack files like `pack` and say the result, including the data of one small part."""
    kept = pack(folder, name, patterns)
    part = os.path.join(os.path.abspath(folder), name, "part-0")
    if kept["parts"] == 1 and os.path.getsize(part) <= SMALL:
        with open(part, "rb") as file:
            kept["data"] = base64.b64encode(file.read()).decode()
    say(**kept)


def pack(folder: str, name: str, patterns: list[str]) -> dict[str, Any]:
    """Pack matching files of the run folder into FOLDER/NAME: `part-0`, …, last `parts.json`."""
    folder = os.path.abspath(folder)
    made = os.path.join(folder, name)
    os.makedirs(made, exist_ok=True)
    words = ["-m", "tpunb.places.remote", "pack", os.path.join(folder, "run"), *patterns]
    process: Any = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/"
    )
    count = 0
    while data := process.stdout.read(PART):
        with open(os.path.join(made, f"part-{count}"), "wb") as part:
            part.write(data)
        count += 1
    errors = process.communicate()[1].decode("utf-8", "replace").strip()[-TAIL:]
    kept: dict[str, Any] = {"parts": count, "error": errors if process.returncode else ""}
    with open(os.path.join(made, "parts.json.part"), "w", encoding="utf-8") as file:
        json.dump(kept, file)
    os.rename(os.path.join(made, "parts.json.part"), os.path.join(made, "parts.json"))
    return kept
