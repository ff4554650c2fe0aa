"""Commands for hosts: sent to them as text and run by their own Python.

differing FOLDER                  print a JSON list of the files on standard input,
                                  {name: [size, time]}, that differ in the folder
receive FOLDER [new]              extract an archive from standard input into the folder, which
                                  must not exist yet if it is to be new
pack FOLDER PATTERN…              write matching files to standard output as an archive
"""

from __future__ import annotations

import contextlib
import glob
import io
import json
import os
import sys
import tarfile

ARCHIVE = b"tpunb-archive:\n"
"""Marks the start of an archive: a login shell may have printed something before."""


def differing(folder: str) -> None:
    """Print the names of the files that differ."""
    folder = os.path.expanduser(folder)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    names = []
    for name, known in json.loads(sys.stdin.read()).items():
        try:
            status = os.stat(os.path.join(folder, name))
        except OSError:
            names.append(name)
            continue
        if [status.st_size, int(status.st_mtime)] != known:
            names.append(name)
    print("\n" + json.dumps(names))


def receive(folder: str, new: str = "") -> None:
    """Extract the archive from standard input."""
    os.umask(0o077)
    folder = os.path.expanduser(folder)
    archive = tarfile.open(fileobj=io.BytesIO(sys.stdin.buffer.read()))  # noqa: SIM115
    if new and os.path.exists(folder):
        sys.exit(f"{folder} exists: another run with this id was started on this host")
    extract(archive, folder)


def extract(archive: tarfile.TarFile, folder: str) -> None:
    """Extract a whole archive, or nothing, as this user's files. Python 3.10 lacks `filter`."""
    for member in archive.getmembers():
        if not (member.isfile() or member.isdir()) or {"", ".."} & set(member.name.split("/")):
            sys.exit(f"{member.name} is not a file or folder inside {folder}")
        member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
    else:
        archive.extractall(folder)


def pack(folder: str, *patterns: str) -> None:
    """Write matching files to standard output; all files below a folder that matches."""
    os.chdir(folder)
    names: set[str] = set()
    for pattern in patterns:
        for name in glob.glob(pattern, recursive=True):
            if os.path.isdir(name):
                for place, _, files in os.walk(name):
                    names.update(os.path.join(place, file) for file in files)
            else:
                names.add(name)
    output = sys.stdout.buffer
    output.write(ARCHIVE)
    # Links, also hard ones, are sent as the files that they point to.
    with tarfile.open(fileobj=output, mode="w|", dereference=True) as archive:
        for name in sorted(names):
            # A run that is still running removes old checkpoints.
            with contextlib.suppress(FileNotFoundError):
                archive.add(os.path.normpath(name), recursive=False)
    output.flush()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
