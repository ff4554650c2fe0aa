"""Reports a host's facts: run on the host by its own Python, with or without tpunb installed.

Sent to the host as text, so it imports nothing of tpunb at the top. Standard input: a JSON object
with the arguments of `report`; standard output: a line that begins with `MARK`, then JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from importlib import metadata

MARK = "tpunb-host: "
PACKAGES = ("tpunb", "torch", "torch_xla", "torch_tpu")


def report(folder: str, ports: list[int]) -> None:
    """Print the facts; `folder`: of the runs, `ports`: which of these are taken."""
    # Address and port of the user's machine, then those at which this host was reached.
    reached = os.environ.get("SSH_CONNECTION", "").split()
    address = reached[2] if len(reached) == 4 else "127.0.0.1"
    facts = {
        "address": address,
        "python": sys.executable,
        "versions": versions(),
        **machine(),
        "folder": os.path.abspath(os.path.expanduser(folder)),
        "taken": [port for port in ports if is_taken(address, port)],
    }
    print("\n" + MARK + json.dumps(facts))  # a login shell may have printed something before


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


def is_taken(address: str, port: int) -> bool:
    """True if the port cannot be listened on."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, port), family=family).close()
    except OSError:
        return True
    return False


if __name__ == "__main__":
    report(**json.loads(sys.stdin.read()))
