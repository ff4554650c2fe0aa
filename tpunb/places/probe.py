"""Reports a host's facts: run on the host by its own Python, with or without tpunb installed.

Sent to the host as text, so it imports nothing of tpunb at the top. Standard input: a JSON object
with "folder" (of the runs) and "ports"; standard output: a line that begins with `MARK`, then JSON.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import shutil
import socket
import sys
import time
from importlib import metadata

MARK = "tpunb-host: "
PACKAGES = ("tpunb", "torch", "torch_xla", "libtpu")


def versions() -> dict[str, str]:
    """Installed versions, keyed by package; '' for a package that is not installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = ""
    return found


def machine() -> dict[str, object]:
    """Facts about the machine that tpunb detects; only "error" if tpunb cannot be imported."""
    try:
        from tpunb.machine import prices
        from tpunb.machine.machine import detect_machine
        from tpunb.utils.version import package_digest
    except ImportError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    here = detect_machine(os.environ)
    price = prices.price_of(here)
    return {
        "machine": {**dataclasses.asdict(here), "metadata": {}},
        "price": None if price is None else dataclasses.asdict(price),
        "digest": package_digest(),
    }


def existing(path: str) -> str:
    """The folder, or its nearest parent that exists."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def taken(address: str, ports: list[int]) -> list[int]:
    """The ports that cannot be listened on."""
    busy = []
    for port in ports:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                busy.append(port)
    return busy


def main() -> None:
    asked = json.loads(sys.stdin.read())
    folder = os.path.abspath(os.path.expanduser(asked["folder"]))
    # Address and port of the user's machine, then those at which this host was reached.
    reached = os.environ.get("SSH_CONNECTION", "").split()
    address = reached[2] if len(reached) == 4 else "127.0.0.1"
    said = {
        "host": socket.gethostname(),
        "address": address,
        "python": sys.executable,
        "versions": versions(),
        **machine(),
        "folder": folder,
        "chips_seen": bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")),
        "free": shutil.disk_usage(existing(folder)).free,
        "taken": taken(address, asked["ports"]),
        "rsync": shutil.which("rsync") or "",
        "time": time.time(),
    }
    print("\n" + MARK + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
