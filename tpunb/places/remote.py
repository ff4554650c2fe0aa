"""What hosts are asked to do: sent as text and run by their own Python, with a verb first.

    unpack FOLDER SIZE DIGEST WORD…   the run's folder from standard input, then `tpunb WORD…`
    differing FOLDER                  of the files on standard input, {name: [size, time]}, those
                                      that are not so here, as a JSON list
    receive FOLDER SIZE DIGEST        an archive from standard input, into the folder
    pack FOLDER PATTERN…              files of it that match, as an archive on standard output
    state FOLDER                      how the run stands
    reach ADDRESS PORT,PORT           listens there, says at which ports (the system chooses for 0),
                                      and connects to those whose addresses and ports are on a line
                                      of standard input; says which failed

`unpack` and `state` need the tpunb of the host.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import json
import os
import socket
import sys
import tarfile
from concurrent import futures

ARCHIVE = b"tpunb-archive:\n"
"""Before an archive: a login shell may have printed something."""


SAYS = "tpunb-says: "
"""Before a line that is meant for who asks."""


def read_exactly(size: int) -> bytes:
    """So many bytes of standard input, and not one more: the rest is for who comes after."""
    data = bytearray()
    while len(data) < size:
        part = os.read(0, min(size - len(data), 1 << 20))
        if not part:
            sys.exit("the connection ended before everything had arrived")
        data += part
    return bytes(data)


def read_archive(size: str, digest: str) -> tarfile.TarFile:
    """The archive on standard input."""
    data = read_exactly(int(size))
    if hashlib.sha256(data).hexdigest() != digest:
        sys.exit("what has arrived is not what was sent")
    return tarfile.open(fileobj=io.BytesIO(data))


def unpack(folder: str, size: str, digest: str, *words: str) -> None:
    """Make the run's folder, and become `tpunb`."""
    os.umask(0o077)
    archive = read_archive(size, digest)
    try:
        os.makedirs(folder)
    except FileExistsError:
        sys.exit(f"{folder} exists: a run of this id was started here before")
    extract(archive, folder)
    with open(os.path.join(folder, "spec.json")) as file:
        os.makedirs(os.path.expanduser(json.load(file)["cwd"]), exist_ok=True)
    # No module of the folder that this is in may stand in for one of tpunb's.
    os.chdir("/")
    os.execv(sys.executable, [sys.executable, "-m", "tpunb", *words])


def differing(folder: str) -> None:
    """Print the names."""
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


def receive(folder: str, size: str, digest: str) -> None:
    """Extract it."""
    extract(read_archive(size, digest), os.path.expanduser(folder))


def extract(archive: tarfile.TarFile, folder: str) -> None:
    """Extract files and folders that are inside, as this user's. Python 3.10 has no filter."""
    for member in archive.getmembers():
        if not (member.isfile() or member.isdir()) or {"", ".."} & set(member.name.split("/")):
            sys.exit(f"{member.name} is no file or folder inside of {folder}")
        member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
    else:
        archive.extractall(folder)


def pack(folder: str, *patterns: str) -> None:
    """Write what matches to standard output. A pattern that names a folder has all below it."""
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
    # Links, also hard ones, as what they lead to: there is no link where they arrive.
    with tarfile.open(fileobj=output, mode="w|", dereference=True) as archive:
        for name in sorted(names):
            # A run that goes on removes old checkpoints.
            with contextlib.suppress(FileNotFoundError):
                archive.add(os.path.normpath(name), recursive=False)
    output.flush()


def reach(address: str, ports: str) -> None:
    """Listen, connect to the others, and listen on until standard input is closed."""
    listeners = [listen(address, int(port)) for port in ports.split(",") if port]
    print("\n" + SAYS + json.dumps([each.getsockname()[1] for each in listeners]), flush=True)
    others = json.loads(sys.stdin.readline() or "[]")
    wanted = [(other, number) for other, numbers in others for number in numbers]
    # Together: what a firewall drops takes the whole time for each port of each host.
    with futures.ThreadPoolExecutor(64) as pool:
        reached = list(pool.map(is_reached, wanted))
    failed = [where for where, well in zip(wanted, reached, strict=True) if not well]
    print("\n" + SAYS + json.dumps(failed), flush=True)
    sys.stdin.read()
    for listener in listeners:
        listener.close()


def is_reached(where: tuple[str, int]) -> bool:
    """Whether somebody takes connections at this address and port."""
    try:
        socket.create_connection(where, timeout=3).close()
    except OSError:
        return False
    return True


def listen(address: str, port: int) -> socket.socket:
    """A socket that takes connections, and does nothing with them."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=128)


def state(folder: str) -> None:
    """Print it."""
    from tpunb.runs.directory import RunDir
    from tpunb.runs.state import run_state

    print(run_state(RunDir(folder)))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
