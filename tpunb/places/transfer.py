"""Copies the files of a place's `files` to every host, as far as they have changed.

Uses rsync if both ends have it, otherwise an archive of the files that differ in size or time.
Nothing is removed on the hosts: runs may have written other files next to them.
"""

from __future__ import annotations

import fnmatch
import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tpunb.places import archive
from tpunb.places.check import quote
from tpunb.places.errors import HostsError, PlaceError
from tpunb.places.place import Cancelled, Check, HostsRun, Say
from tpunb.places.transport import (
    Answer,
    Transport,
    ask_hosts,
    receiver,
    remote_command,
    run_commands,
)
from tpunb.utils.text import size

LONGEST = 24 * 3600.0
"""Time-out of copying in seconds: a slow copy is visible, and can be stopped."""


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


def send_files(
    transport: Transport,
    placed: HostsRun,
    say: Say,
    cancelled: Check,
) -> None:
    """Copy the files of a place to all hosts. Raises HostsError, and Cancelled."""
    root = Path(placed.root)
    names = chosen_files(root, placed.place.host_settings.files)
    total = sum((root / name).stat().st_size for name in names)
    files, hosts_ = len(names), len(placed.hosts)
    say(
        f"copying {files} file{'s' * (files != 1)}, {size(total)}, "
        f"to {hosts_} host{'s' * (hosts_ != 1)}"
    )
    hosts = range(len(placed.hosts))
    by_rsync = [host for host in hosts if placed.rsync and transport.shell(host) is not None]
    if by_rsync and shutil.which("rsync") is not None:
        _rsync(transport, placed, names, by_rsync, cancelled)
    else:
        _send_changed(transport, placed, names, cancelled)


def _rsync(
    transport: Transport,
    placed: HostsRun,
    names: list[str],
    hosts: list[int],
    cancelled: Check,
) -> None:
    listed = "\0".join(names).encode()
    commands = {}
    for host in hosts:
        shell = transport.shell(host)
        assert shell is not None
        rsh, name = shell
        if ":" in name:  # an IPv6 address: rsync would take the rest after its colon for a folder
            user, at, address = name.rpartition("@")
            name = f"{user}{at}[{address}]"
        command = [
            "rsync", "--times", "--perms", "--copy-links", "--compress", "--protect-args",
            "--from0", "--files-from=-",
            f"--rsync-path=mkdir -p -m 700 {quote(placed.work)} && rsync",
            f"--rsh={shlex.join(rsh)}", f"{placed.root}/", f"{name}:{_relative(placed.work)}/",
        ]  # fmt: skip
        commands[host] = (command, listed)
    answers = run_commands(placed.hosts, commands, timeout=LONGEST, cancelled=cancelled)
    # All of stderr: rsync's last two lines are the same for every reason.
    whole = {host: replace(a, problem=a.problem and a.errors) for host, a in answers.items()}
    _raise_for(whole, placed, cancelled)


def _raise_for(
    answers: Mapping[int, Answer],
    placed: HostsRun,
    cancelled: Check,
) -> None:
    if cancelled():
        raise Cancelled
    if problems := [(a.host, a.problem) for a in answers.values() if a.problem]:
        raise HostsError(placed.place.name, tuple(problems))


def _relative(folder: str) -> str:
    """The path for rsync, where a relative path starts in the home folder."""
    return folder[2:] if folder.startswith("~/") else folder


def _send_changed(
    transport: Transport, placed: HostsRun, names: list[str], cancelled: Check
) -> None:
    root = Path(placed.root)
    hosts = range(len(placed.hosts))
    here = {}
    for name in names:
        status = (root / name).stat()
        here[name] = [status.st_size, int(status.st_mtime)]
    command = remote_command(placed.python, "differing", placed.work)
    listed = json.dumps(here).encode()
    answers = ask_hosts(transport, dict.fromkeys(hosts, (command, listed)), cancelled=cancelled)
    _raise_for(answers, placed, cancelled)
    packed: dict[tuple[str, ...], bytes] = {}
    orders = {}
    for host, answer in answers.items():
        changed = tuple(json.loads(answer.output.splitlines()[-1]))
        if not changed:
            continue
        if changed not in packed:
            packed[changed] = archive.pack({name: root / name for name in changed}, "gz")
        data = packed[changed]
        orders[host] = (receiver(placed.python, placed.work, data), data)
    answers = ask_hosts(transport, orders, timeout=LONGEST, cancelled=cancelled)
    _raise_for(answers, placed, cancelled)
