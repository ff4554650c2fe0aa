"""Copies files to the hosts of a run before it begins, and from them.

The files of a place's `files` are sent as an archive of those that differ in size or time. Nothing
is removed on the hosts: runs may have written other files next to them. A run's supervisor starts
these as commands of their own (`command`).
"""

from __future__ import annotations

import contextlib
import fnmatch
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

from tpunb.places import remote
from tpunb.places.errors import HostsError, PlaceError
from tpunb.places.place import HostsRun, place_of
from tpunb.places.transport import Answer, Transport, ask_hosts, make_transport, remote_command
from tpunb.runs import folder_stream
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note, Phase
from tpunb.runs.folder_stream import SENT
from tpunb.runs.spec import PhaseKind
from tpunb.utils import files
from tpunb.utils.errors import TpunbError
from tpunb.utils.files import PACKAGE_ROOT
from tpunb.utils.text import size

LONGEST = 24 * 3600.0
"""Time-out of copying in seconds: a slow copy is visible, and can be stopped."""


def command(what: Literal["send", "fetch"], run: RunDir) -> tuple[str, ...]:
    """The command that sends a run's files to its hosts, or fetches its large results."""
    start = (
        f"import os, sys; sys.path[0] = {PACKAGE_ROOT!r}; from tpunb.utils import processes; "
        "processes.die_with_parent(os.getppid()); from tpunb.places import transfer; "
    )
    return sys.executable, "-c", f"{start}transfer.{what}()", str(run.path)


def send() -> None:
    """Send the run folder's files and those of the place. Argument in `sys.argv`: the run folder.

    If that fails, the problems are printed as JSON: [host or null, text] for each.
    """
    run = RunDir(sys.argv[1])
    try:
        placed, transport = _open(run)
        if placed.place.host_settings.files:
            send_files(transport, placed, lambda text: run.emit(Phase(PhaseKind.STARTING, text)))
        data = pack({name: path for name in SENT if (path := run.path / name).exists()})
        orders = {
            host: (remote_command(placed.python, "receive", folder, "new"), data)
            for host, folder in enumerate(placed.folders)
        }
        _raise_for(ask_hosts(transport, orders, timeout=LONGEST), placed)
    except (TpunbError, OSError) as error:
        problems = error.problems if isinstance(error, HostsError) else ((None, str(error)),)
        print(json.dumps(problems))
        sys.exit(1)


def fetch() -> None:
    """Fetch the values of `--returns` and the trace of `--profile`, as far as there are any.

    Argument in `sys.argv`: the run folder. What could not be fetched becomes a note of the run.
    """
    run = RunDir(sys.argv[1])
    spec = run.read_spec()
    wanted: list[tuple[str, str, list[int] | None]] = []
    if spec.returns:  # rank 0 has written them
        wanted.append((run.returns.name, "the values of --returns", [0]))
    if spec.profile is not None:  # the ranks' parts are useful only together
        wanted.append((run.profile.name, "the trace of --profile", None))
    for name, what, hosts in wanted:
        try:
            fetch_files(run, [name], hosts)
        except (TpunbError, OSError) as error:
            run.emit(Note(f"{what} could not be fetched: {error}"))


def fetch_files(
    run: RunDir, patterns: Sequence[str], hosts: Sequence[int] | None = None
) -> list[Path]:
    """Copy matching files of the hosts' run folders into a run's folder; return their paths.

    `hosts`: node ranks of the hosts to copy from; None: all. Raises TpunbError for a run on this
    machine, and if a host does not answer.
    """
    placed, transport = _open(run)
    spec = run.read_spec()
    commands = {
        host: (remote_command(placed.python, "pack", folder, *patterns), b"")
        for host, folder in enumerate(placed.folders)
        if hosts is None or host in hosts
    }
    fetched = []
    with contextlib.ExitStack() as stack:
        # Checkpoints may be larger than this machine's memory.
        archives = {
            host: stack.enter_context(tempfile.TemporaryFile(dir=run.path)) for host in commands
        }
        answers = ask_hosts(transport, commands, timeout=LONGEST, into=archives)
        _raise_for(answers, placed)
        for host, packed in archives.items():
            try:
                fetched += extract(packed, run.path, host, spec.ranks_on(host))
            except (ValueError, tarfile.TarError) as error:
                problem = (answers[host].host, f"its archive cannot be read: {error}")
                name = placed.place.name
                raise HostsError(name, (problem,), "not all files were fetched") from None
    return fetched


def _open(run: RunDir) -> tuple[HostsRun, Transport]:
    """Where a run is, and the way to its hosts. Raises TpunbError."""
    if place_of(run) is None:
        raise TpunbError(f"run {run.id} ran on this machine: all its files are in {run.path}")
    try:
        placed = HostsRun.read(run)
    except ValueError as error:
        raise TpunbError(f"{run.place} cannot be read: {error}") from None
    transport = make_transport(placed.place)
    names = transport.hosts
    if sorted(names) != sorted(placed.hosts):
        raise PlaceError(
            f"run {run.id} was started on {', '.join(placed.hosts)}, but place "
            f"{placed.place.name} now has other hosts: {', '.join(names)}"
        )
    transport.reorder([names.index(host) for host in placed.hosts])
    return placed, transport


def extract(packed: IO[bytes], into: Path, host: int, ranks: range) -> list[Path]:
    """Extract files of a host's run folder into the local one. Raises ValueError and TarError."""
    packed.seek(0)
    start = packed.read(1 << 20).find(remote.ARCHIVE)
    if start < 0:
        raise ValueError("it has no start")
    packed.seek(start + len(remote.ARCHIVE))
    fetched = []
    with tarfile.open(fileobj=packed, mode="r|") as members:
        for member in members:
            place = folder_stream.fetched_path(_inside(member.name), host, ranks)
            if not member.isfile() or place is None:
                continue
            path = into / place
            path.parent.mkdir(parents=True, exist_ok=True)
            source = members.extractfile(member)
            assert source is not None
            with open(files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                shutil.copyfileobj(source, file)
            fetched.append(path)
    return fetched


def _inside(name: str) -> str:
    """Return a path of an archive. Raises ValueError if it leads out of the folder."""
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name} is not in the run folder")
    return name


def chosen_files(root: Path, rules: Sequence[str]) -> list[str]:
    """The files to copy, relative to `root`: those that a rule matches, or in matching folders.

    Rules that begin with `- ` leave out files whose name or path they match. Raises PlaceError for
    a rule that is not a pattern or matches nothing.
    """
    out = [rule[2:].strip().rstrip("/") for rule in rules if rule.startswith("- ")]
    found: set[str] = set()
    for rule in rules:
        if rule.startswith("- "):
            continue
        if rule.startswith("/") or ".." in Path(rule).parts:
            raise PlaceError(f"files = [{rule!r}]: only files below {root} can be copied")
        try:
            matched = [root] if rule.rstrip("/") == "." else list(root.glob(rule))
        except ValueError as error:
            raise PlaceError(f"files = [{rule!r}] is not a pattern: {error}") from None
        if not matched:
            raise PlaceError(f"files = [{rule!r}]: no file in {root} matches")
        for path in matched:
            inside = [path] if path.is_file() else path.rglob("*")
            found.update(each.relative_to(root).as_posix() for each in inside if each.is_file())
    return sorted(name for name in found if not _is_left_out(name, out))


def _is_left_out(name: str, rules: Sequence[str]) -> bool:
    parts = name.split("/")
    paths = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    return any(fnmatch.fnmatch(each, rule) for rule in rules for each in (*parts, *paths))


def send_files(transport: Transport, placed: HostsRun, say: Callable[[str], None]) -> None:
    """Copy the files of a place to all hosts; `say` is called with progress. Raises HostsError."""
    root = Path(placed.root)
    names = chosen_files(root, placed.place.host_settings.files)
    total = sum((root / name).stat().st_size for name in names)
    files, hosts_ = len(names), len(placed.hosts)
    say(
        f"copying {files} file{'s' * (files != 1)}, {size(total)}, "
        f"to {hosts_} host{'s' * (hosts_ != 1)}"
    )
    hosts = range(len(placed.hosts))
    here = {}
    for name in names:
        status = (root / name).stat()
        here[name] = [status.st_size, int(status.st_mtime)]
    command = remote_command(placed.python, "differing", placed.work)
    listed = json.dumps(here).encode()
    answers = ask_hosts(transport, dict.fromkeys(hosts, (command, listed)))
    _raise_for(answers, placed)
    packed: dict[tuple[str, ...], bytes] = {}
    orders, receive = {}, remote_command(placed.python, "receive", placed.work)
    for host, answer in answers.items():
        changed = tuple(json.loads(answer.output.splitlines()[-1]))
        if not changed:
            continue
        if changed not in packed:
            packed[changed] = pack({name: root / name for name in changed})
        orders[host] = (receive, packed[changed])
    answers = ask_hosts(transport, orders, timeout=LONGEST)
    _raise_for(answers, placed)


def pack(files: Mapping[str, Path]) -> bytes:
    """Make a tar archive of files and folders, keyed by path in it.

    Links are packed as the files that they point to, which the other machine does not have.
    """
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz", dereference=True, compresslevel=1) as archive:
        for name, path in files.items():
            archive.add(path, name, filter=_without_owner)
    return data.getvalue()


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
    return member


def _raise_for(answers: Mapping[int, Answer], placed: HostsRun) -> None:
    if problems := [(a.host, a.problem) for a in answers.values() if a.problem]:
        raise HostsError(placed.place.name, tuple(problems))
