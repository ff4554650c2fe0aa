"""In the block no name server is queried; afterwards it is queried again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import hosts
from tests.fakes.hosts import Pod

LISTEN = """
import socket
asked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
asked.bind(("127.0.0.1", 53))
print("listens", flush=True)
while True:
    message, sender = asked.recvfrom(512)
    print(b"in-addr" in message, flush=True)
    asked.sendto(message[:2] + b"\\x81\\x83" + message[4:], sender)  # there is no such name
"""
LOOK_UP = """
import socket
from tpunb.utils.name_service import only_hosts_file

def name(address):
    return socket.getnameinfo((address, 1), socket.NI_NUMERICSERV)[0]

with only_hosts_file():
    print(name("10.1.1.1"), name("10.9.9.9"), socket.gethostbyname("known"))
print(name("10.1.1.1"), name("10.8.8.8"))
"""


@pytest.mark.usefixtures("starts_processes")
def test_only_what_is_looked_up_outside_of_the_block_is_asked(tmp_path: Path) -> None:
    if refused := hosts.why_refused():
        pytest.skip(refused)
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    with Pod(1) as pod:
        host = pod[0]
        host.know({"known": "10.1.1.1"})
        resolver = os.path.realpath("/etc/resolv.conf")
        host.run(["mount", "--bind", str(tmp_path / "resolv.conf"), resolver], check=True)
        with host.popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"listens\n"
            done = host.run([sys.executable, "-c", LOOK_UP])
            server.terminate()
            asked = server.stdout.read()
    assert done.stdout == "known 10.9.9.9 10.1.1.1\nknown 10.8.8.8\n", done.stderr
    assert asked == b"True\n"
