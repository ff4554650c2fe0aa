"""The addresses by which the ranks of several hosts reach each other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import MutableMapping
from pathlib import Path

from tpunb.utils import env_vars

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


def resolve(host: str, port: int) -> tuple[int, str]:
    """Family and numeric form of an address. Only a name is looked up."""
    family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    return family, str(target[0])


def own_address() -> str:
    """The address at which other hosts reach this one.

    TPUNB_ADDRESS, or under torchrun the address from which this host reaches MASTER_ADDR. The
    host's name is not resolved: on many machines that gives the loopback interface, or nothing.
    """
    if address := os.environ.get(env_vars.ADDRESS):
        return address
    port = int(os.environ["MASTER_PORT"])
    family, target = resolve(os.environ["MASTER_ADDR"], port)
    with socket.socket(family, socket.SOCK_DGRAM) as route:  # connecting it sends no packet
        route.connect((target, port))
        return str(route.getsockname()[0])


def bind_gloo(env: MutableMapping[str, str]) -> None:
    """Have gloo groups of the user's code use this host's own address (GLOO_SOCKET_IFNAME).

    By default gloo resolves the host's name, and silently uses the loopback interface if that
    fails; then ranks of other hosts cannot connect (torch 2.8, 2.9). The user's own setting stays.
    """
    if _GLOO_INTERFACE not in env and (name := interface_of(own_address())):
        env[_GLOO_INTERFACE] = name


def interface_of(address: str) -> str:
    """The network interface with this address: 'eth0'; '' if there is none."""
    if ":" in address:
        return _with_ipv6(socket.inet_pton(socket.AF_INET6, address.partition("%")[0]))
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                if fcntl.ioctl(query, _SIOCGIFADDR, request)[20:24] == wanted:
                    return name
    return ""


def _with_ipv6(address: bytes) -> str:
    with contextlib.suppress(OSError):  # a system without IPv6
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            number, *_, name = line.split()
            if bytes.fromhex(number) == address:
                return name
    return ""
