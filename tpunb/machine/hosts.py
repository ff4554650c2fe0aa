"""Determines which of several hosts this machine is, from the first source that knows.

    flags                                     `tpunb node --nnodes … --node-rank … --rendezvous …`
    TPU_WORKER_ID, TPU_WORKER_HOSTNAMES       GKE, KubeRay's webhook, Cloud TPU in env mode
    JOB_COMPLETION_INDEX                      an Indexed Job of Kubernetes, JobSet: the number alone
    SKYPILOT_NODE_RANK, SKYPILOT_NODE_IPS     SkyPilot
    CLUSTER_SPEC                              Vertex AI, with several worker pools
    the metadata server                       Cloud TPU VMs, managed instance groups
    none of them                              one host

The first source with this host's number is used; flags add what is missing. This machine's own name
is never looked up: it may not resolve, or resolve to 127.0.1.1.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tpunb.machine.metadata import Metadata
from tpunb.utils.errors import SetupError

PORT = 29477
"""Default port at which host 0 listens for the supervisors of the other hosts."""


@dataclass(frozen=True)
class Identity:
    """This host's number among the hosts of a run, and how to reach host 0."""

    nnodes: int
    node_rank: int
    leader: str
    """Address or name of host 0."""
    port: int
    source: str
    """Where this was found: 'flags', 'TPU_WORKER_ID and TPU_WORKER_HOSTNAMES', …"""
    hosts: tuple[str, ...] = ()
    """Names or addresses of all hosts, in order of node rank; () if unknown."""
    address: str = ""
    """Address at which the other hosts reach this one; found by `with_addresses`."""


@dataclass(frozen=True)
class _Found:
    source: str
    node_rank: int | None = None
    nnodes: int | None = None
    hosts: tuple[str, ...] = ()


def identify(
    env: Mapping[str, str],
    ask: Callable[[], Metadata],
    *,
    nnodes: int | None = None,
    node_rank: int | None = None,
    rendezvous: str | None = None,
    address: str | None = None,
) -> Identity:
    """Determine this host's identity. `ask` queries the metadata server, if no other source helps.

    The other arguments are flags. Raises SetupError if the sources contradict each other, or if
    something is missing.
    """
    found = _Found("flags", node_rank, nnodes)
    if node_rank is None and nnodes != 1:
        found = _find(env, ask)
    if nnodes is not None and found.nnodes not in (None, nnodes):
        raise SetupError(
            f"--nnodes {nnodes} contradicts the number of hosts from {found.source}: {found.nnodes}"
        )
    count = nnodes if nnodes is not None else found.nnodes
    rank = found.node_rank if node_rank is None else node_rank
    if count == 1 and rank is None:
        rank = 0
    if count is None or rank is None:
        missing = "--nnodes" if count is None else "--node-rank"
        known = f"this is host {rank}" if rank is not None else f"there are {count} hosts"
        raise SetupError(f"{known} (from {found.source}): give {missing} as well")
    if not 0 <= rank < count:
        raise SetupError(
            f"node rank {rank} (from {found.source}): with {count} hosts it must be from 0 to "
            f"{count - 1}"
        )
    leader, port = found.hosts[0] if found.hosts else "", PORT
    if rendezvous is not None:
        leader, port = split_port(rendezvous)
    if not leader and count > 1:
        raise SetupError(
            f"the address of host 0 is not known (from {found.source}): give --rendezvous "
            "HOST[:PORT]"
        )
    return Identity(
        count, rank, leader or "127.0.0.1", port, found.source, found.hosts, address or ""
    )


def split_port(text: str) -> tuple[str, int]:
    """Split '10.0.0.2:29400' into host and port, by default `PORT`. Raises SetupError."""
    host, colon, port = text.rpartition(":")
    if not colon or (host.count(":") and not host.startswith("[")):  # a bare IPv6 address
        host, port = text, str(PORT)
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SetupError(f"--rendezvous {text}: it must be HOST or HOST:PORT")
    return host, int(port)


def _find(env: Mapping[str, str], ask: Callable[[], Metadata]) -> _Found:
    for look in (_tpu_worker, _completion_index, _skypilot, _cluster_spec):
        if (found := look(env)) is not None:
            return found
    answers = ask()
    endpoints = answers.values.get("worker-network-endpoints", "").split(",")
    addresses = tuple(entry.split(":")[-1] for entry in endpoints if entry)
    number = answers.values.get("agent-worker-number") or answers.tpu_env.get("WORKER_ID", "")
    if len(addresses) > 1:
        if not number.isdecimal():
            raise SetupError(
                f"the metadata server names {len(addresses)} hosts, but not which of them this "
                "is: give --node-rank"
            )
        return _Found("the metadata server", int(number), len(addresses), addresses)
    return _Found("the default: no source names other hosts", 0, 1)


def _tpu_worker(env: Mapping[str, str]) -> _Found | None:
    hosts = _names(env.get("TPU_WORKER_HOSTNAMES", "").split(","))
    if "TPU_WORKER_ID" not in env or not hosts:
        return None
    source = "TPU_WORKER_ID and TPU_WORKER_HOSTNAMES"
    return _Found(source, _number(source, env["TPU_WORKER_ID"]), len(hosts), hosts)


def _completion_index(env: Mapping[str, str]) -> _Found | None:
    source = "JOB_COMPLETION_INDEX"
    return _Found(source, _number(source, env[source])) if source in env else None


def _skypilot(env: Mapping[str, str]) -> _Found | None:
    hosts = _names(env.get("SKYPILOT_NODE_IPS", "").split("\n"))
    if "SKYPILOT_NODE_RANK" not in env or not hosts:
        return None
    source = "SKYPILOT_NODE_RANK and SKYPILOT_NODE_IPS"
    return _Found(source, _number(source, env["SKYPILOT_NODE_RANK"]), len(hosts), hosts)


def _cluster_spec(env: Mapping[str, str]) -> _Found | None:
    """Vertex AI: {"cluster": {"workerpool0": [HOST:PORT], …}, "task": {"type", "index"}}."""
    if "CLUSTER_SPEC" not in env:
        return None
    try:
        spec = json.loads(env["CLUSTER_SPEC"])
        pools = {name: list(map(str, spec["cluster"][name])) for name in sorted(spec["cluster"])}
        kind, index = str(spec["task"]["type"]), int(spec["task"]["index"])
        before = [host for name, pool in pools.items() if name < kind for host in pool]
        hosts = [host for pool in pools.values() for host in pool]
        rank = len(before) + index
        if kind not in pools or not 0 <= index < len(pools[kind]):
            raise ValueError(f"its task is {kind} {index}, which is not in its cluster")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SetupError(f"CLUSTER_SPEC cannot be read: {error}") from None
    return _Found("CLUSTER_SPEC", rank, len(hosts), tuple(host.split(":")[0] for host in hosts))


def _names(entries: list[str]) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in entries if entry.strip())


def _number(source: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise SetupError(f"{source}: {text!r} is not a host number")
    return int(text)


def with_addresses(identity: Identity, resolve: Callable[[str], str] | None = None) -> Identity:
    """Return `identity` with the addresses of host 0 and of this host, unless they are given.

    `resolve` looks up a name. Raises SetupError if host 0's name does not resolve, or if other
    hosts cannot reach this one at the address found.
    """
    look_up = resolve or _look_up
    own = identity.address or _own_entry(identity)
    if identity.node_rank == 0:
        leader = own or (identity.leader if is_address(identity.leader) else "")
        leader = leader or look_up(identity.leader)
        own = leader
    else:
        leader = look_up(identity.leader)
        own = own or route_to(leader)
    given = identity.address or is_address(identity.leader)
    if identity.nnodes > 1 and ipaddress.ip_address(own).is_loopback and not given:
        raise SetupError(
            f"{identity.leader} is {own} on this machine, where no other host can reach it: "
            "give --rendezvous or --address with its address in the hosts' network"
        )
    return replace(identity, leader=leader, address=own)


def _own_entry(identity: Identity) -> str:
    """This host's entry in the list of hosts, if that is an address; otherwise ''."""
    if len(identity.hosts) != identity.nnodes:
        return ""
    entry = identity.hosts[identity.node_rank]
    return entry if is_address(entry) else ""


def is_address(text: str) -> bool:
    """True for an IP address, False for a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _look_up(name: str) -> str:
    if is_address(name):
        return name
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SetupError(
            f"the name of host 0, {name}, does not resolve on this host: {error.strerror}. Give "
            "--rendezvous with its address"
        ) from None
    return str(found[0][4][0])


def route_to(address: str) -> str:
    """This machine's address on the route to another one. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise SetupError(f"no route to {address}: {error.strerror}") from None
        return str(probe.getsockname()[0])
