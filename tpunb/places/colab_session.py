"""What a session of Colab is asked to do: sent as text, and run in its kernel by `colab exec`.

What it says is a line each that begins with `MARK`. Paths are relative to the kernel's working
directory, which `colab exec` has made /content; people upload and download there, and files whose
names begin with a dot are refused. Standard library only.

    begin    install tpunb, start `tpunb node`, which outlives the kernel's cell, and follow
    follow   tell what the run folder says; a kernel runs one cell at a time, so what comes
             meanwhile (stops, wishes for files, another follower) comes as files in the folder
    packed   put files of the run folder together, in parts that `colab download` can bring
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
"""Seconds of silence after which it says that it is there."""
RATE = 500_000
"""Bytes a second, at most: a Jupyter server drops what prints faster than 1 MB a second."""
MOST = 16_000_000
"""Bytes that one cell says: `colab` keeps them all in memory, and in its history."""
PART = 32_000_000
"""Bytes of one download, which Jupyter reads into memory as a whole."""
SMALL = 400_000
"""Bytes that are said instead of downloaded."""
LARGE = ("checkpoints", "profile")
"""What a run leaves in its folder and no stream has, but for `returns`."""
TAIL = 2000
"""Bytes of what a command has printed before it failed."""


def say(**values: object) -> None:
    """A line for who asks."""
    print(MARK + json.dumps(values), flush=True)


def versions() -> dict[str, str]:
    """Of Python, and of what a run needs besides tpunb; '' for what is not installed."""
    found = {"python": platform.python_version()}
    for package in ("torch", "torch_xla"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = ""
    return found


def begin(folder: str, packages: list[str], wheel: str, follower: str, seconds: float) -> None:
    """Install what was uploaded, start the run, and follow it; first says `hello` or `error`."""
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
    os.unlink(start)  # it may hold secrets, and so does what it came in
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
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    if done.returncode:
        told = [json.loads(line).get("message", "") for line in lines[-1:]]
        errors = done.stderr.decode("utf-8", "replace").strip()[-TAIL:]
        say(versions=here, error=told[0] if told and told[0] else errors)
        return
    say(versions=versions(), hello=lines[0])
    follow(folder, {}, follower, seconds)


def install(packages: list[str]) -> str:
    """With uv where it is, which is quicker; what went wrong, '' if nothing has."""
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
    return (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-TAIL:] or "no reason"


def follow(folder: str, since: dict[str, int], follower: str, seconds: float) -> None:
    """Tell what the run folder says from offsets on, until the run has ended; then `over`.

    Also after so many seconds, or bytes, or when another follower's name is in the folder: then
    not `over`.
    """
    folder = os.path.abspath(folder)
    run = os.path.join(folder, "run")
    if not os.path.exists(os.path.join(run, "spec.json")):
        say(over=True, error="the run was never started there")
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
        process.kill()  # it only looks
        process.wait()
        process.stdout.close()
    large = [name for name in LARGE if there(run, name)]
    say(over=over, large=large)


def there(run: str, name: str) -> bool:
    """Whether the run has left something of this name, which is not streamed."""
    path = os.path.join(run, name)
    return bool(os.listdir(path)) if os.path.isdir(path) else os.path.exists(path)


def tell(process: Any, line: str) -> None:
    """A line for `tpunb node`, if it still listens."""
    with contextlib.suppress(OSError):
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()


def pass_on(folder: str, process: Any, follower: str, seconds: float) -> bool:
    """Between `tpunb node` and who follows; whether the run has ended."""
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
    """Whether nobody else follows by now."""
    with open(os.path.join(folder, "follower.txt"), encoding="utf-8") as file:
        return file.read() in (follower, "")  # '' while it is being written


def take_requests(folder: str, process: Any) -> None:
    """Do what was asked by files: `stop-…` has a line for the run, `pack-…` the files to pack."""
    for name in sorted(os.listdir(folder)):
        if not name.startswith(("stop-", "pack-")) or not name.endswith(".json"):
            continue
        path = os.path.join(folder, name)
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if not text.endswith("\n"):
            continue  # it is still arriving
        os.unlink(path)
        if name.startswith("stop-"):
            tell(process, text.strip())
        else:
            # Beside what is told: checkpoints take longer than who follows waits for a word.
            order = json.loads(text)
            threading.Thread(target=pack, args=(folder,), kwargs=order, daemon=True).start()


def packed(folder: str, name: str, patterns: list[str]) -> None:
    """The same for who waits for it: one small part is said at once."""
    kept = pack(folder, name, patterns)
    part = os.path.join(os.path.abspath(folder), name, "part-0")
    if kept["parts"] == 1 and os.path.getsize(part) <= SMALL:
        with open(part, "rb") as file:
            kept["data"] = base64.b64encode(file.read()).decode()
    say(**kept)


def pack(folder: str, name: str, patterns: list[str]) -> dict[str, Any]:
    """Files of the run folder that match, in FOLDER/NAME: `part-0`, …, and last `parts.json`."""
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
