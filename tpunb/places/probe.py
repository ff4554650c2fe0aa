"""Reports a host's facts: run on the host by its own Python, with or without tpunb installed.

Sent to the host as text, so it imports nothing of tpunb at the top. Standard input: a JSON object
with the arguments of `report` or `reach`; standard output: a line that begins with `MARK`, then
JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import sys
import time
from importlib import metadata

MARK = "tpunb-host: "
PACKAGES = ("tpunb", "torch", "torch_xla", "torch_tpu")


def report(folder: str, ports: list[int]) -> None:
    """Print the facts; `folder`: of the runs, `ports`: which of these are taken."""
    # Address and port of the user's machine, then those at which this host was reached.
    reached = os.environ.get("SSH_CONNECTION", "").split()
    address = reached[2] if len(reached) == 4 else "127.0.0.1"
    say(
        {
            "address": address,
            "python": sys.executable,
            "versions": versions(),
            **machine(),
            "folder": os.path.abspath(os.path.expanduser(folder)),
            "taken": [port for port in ports if is_taken(address, port)],
            "time": time.time(),
        }
    )


def say(facts: object) -> None:
    """Print an answer: a login shell may have printed something before."""
    print("\n" + MARK + json.dumps(facts), flush=True)


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


async def reach(address: str, listening: dict[str, list[int]], seconds: float) -> None:
    """Listen, connect to all other hosts, and print the [address, port] that were not reached.

    `listening`: the ports of every host, by address. Ends when all others have connected to all
    ports of this host, or after `seconds`.
    """
    end = time.monotonic() + seconds
    left = len(listening[address]) * (len(listening) - 1)
    all_came = asyncio.Event()

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        left -= 1
        writer.close()
        if not left:
            all_came.set()

    for port in listening[address]:
        await asyncio.start_server(accept, address, port)
    others = [(to, port) for to in listening if to != address for port in listening[to]]
    reached = await asyncio.gather(*(is_reached(*other, end) for other in others))
    say([other for other, well in zip(others, reached, strict=True) if not well])
    if left:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(all_came.wait(), max(0.0, end - time.monotonic()))


async def is_reached(address: str, port: int, end: float) -> bool:
    """True if a connection succeeds until `end`: the other host may begin to listen later."""
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            opened = asyncio.open_connection(address, port)
            _, writer = await asyncio.wait_for(opened, left)
            writer.close()
            return True
        await asyncio.sleep(0.1)
    return False


if __name__ == "__main__":
    asked = json.loads(sys.stdin.read())
    if "listening" in asked:
        asyncio.run(reach(**asked))
    else:
        report(**asked)
