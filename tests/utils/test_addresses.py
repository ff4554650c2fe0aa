from __future__ import annotations

import sys

import pytest

from tests.fakes import hosts as fakes
from tests.fakes.hosts import Pod
from tpunb.utils import addresses

LOOK = """
import os
from tpunb.utils import addresses

found = [addresses.interface_of(address) or "-" for address in ("10.77.0.3", "10.77.0.2")]
print(addresses.own_address(), *found)
addresses.bind_gloo(os.environ)
print(os.environ["GLOO_SOCKET_IFNAME"])
os.environ.update(TPUNB_ADDRESS="::1", GLOO_SOCKET_IFNAME="chosen")
addresses.bind_gloo(os.environ)
print(addresses.own_address(), addresses.interface_of("::1"), os.environ["GLOO_SOCKET_IFNAME"])
"""


@pytest.mark.usefixtures("starts_processes")
def test_a_host_finds_the_address_and_the_interface_by_which_others_reach_it() -> None:
    if refused := fakes.why_refused():
        pytest.skip(refused)
    with Pod(2) as pod:
        pod[1].know({"localhost": "127.0.0.1", "h1": "127.0.1.1"})  # as on Debian
        env = {"MASTER_ADDR": pod[0].address, "MASTER_PORT": "29500"}
        done = pod[1].run([sys.executable, "-c", LOOK], env)
    assert done.stdout == "10.77.0.3 eth0 -\neth0\n::1 lo chosen\n", done.stderr


def test_an_address_is_not_looked_up_and_nobody_has_to_listen_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TPUNB_ADDRESS", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert addresses.own_address() == "127.0.0.1"
    assert addresses.interface_of("127.0.0.1") == "lo"
    assert addresses.interface_of("192.0.2.77") == addresses.interface_of("2001:db8::77") == ""
