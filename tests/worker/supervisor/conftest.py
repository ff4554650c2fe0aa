"""Simulated processes, for tests of state machines with given time, exits and messages."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tpunb.utils import processes
from tpunb.utils.processes import Process


@dataclass
class World:
    """Simulated living processes; each ends at the first signal that is deadly for it."""

    deadly: dict[Process, set[int]] = field(default_factory=dict)
    time: float = 0.0
    sent: list[tuple[int, int]] = field(default_factory=list)
    exit_codes: dict[int, int] = field(default_factory=dict)
    zombies: set[int] = field(default_factory=set)

    def living(self) -> list[Process]:
        return list(self.deadly)

    def find(self, pid: int) -> Process | None:
        return next((process for process in self.deadly if process.pid == pid), None)

    def end(self, process: Process, number: int) -> bool:
        self.sent.append((process.pid, number))
        if number in self.deadly.get(process, ()):
            del self.deadly[process]
        return True


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(processes, "signal_and_continue", world.end)
    monkeypatch.setattr(processes, "find_process", world.find)
    monkeypatch.setattr(processes, "is_alive", lambda process: process in world.deadly)
    monkeypatch.setattr(processes, "descendants", lambda ancestor: world.living())
    monkeypatch.setattr(processes, "exit_code", world.exit_codes.get)
    monkeypatch.setattr(processes, "is_zombie", world.zombies.__contains__)
    monkeypatch.setattr(processes, "reap_adopted", lambda own: None)
    return world
