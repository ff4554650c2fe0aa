"""Everything that is known of a set-up, and what is wrong with it: `tpunb doctor`, `%tpu_setup`.

Takes no TPU, imports neither torch nor torch_xla, and waits for nobody longer than
`metadata.QUICK`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tpunb.platforms import (
    chips,
    clashes,
    credentials,
    hardware,
    holders,
    machine,
    metadata,
    prices,
    resources,
    versions,
)
from tpunb.platforms.credentials import Credential
from tpunb.platforms.holders import Holding
from tpunb.platforms.machine import Machine
from tpunb.platforms.metadata import Metadata
from tpunb.platforms.problem import Problem
from tpunb.platforms.resources import Room
from tpunb.platforms.versions import Installed
from tpunb.price import Price, Quota


@dataclass(frozen=True)
class Report:
    """What was found."""

    machine: Machine
    cores: int
    """Ranks of a run that does not say how many."""
    holding: Holding
    packages: Installed
    room: Room
    credentials: tuple[Credential, ...]
    problems: tuple[Problem, ...]
    """What must be mended, the first thing first."""
    advice: tuple[Problem, ...]
    """What is good to know."""
    price: Price | None = None
    """What this machine costs an hour, where it is known."""
    quota: Quota | None = None
    """What the platform gives in a week, where it says so."""

    def with_problem(self, problem: Problem | None) -> Report:
        """The same with one more problem, if there is one."""
        return self if problem is None else replace(self, problems=(*self.problems, problem))

    def to_json(self) -> dict[str, Any]:
        """What `tpunb doctor --json` prints."""
        here, made = self.machine, self.machine.made
        return {
            "platform": here.platform,
            "kind": here.kind,
            "device": here.device,
            "chips": here.chips,
            "cores": self.cores,
            "accelerator_type": here.accelerator_type,
            "generation": here.generation,
            "cores_per_chip": made.cores if made is not None else None,
            "devices_per_chip": here.devices_per_chip if here.chips else None,
            "hbm_per_chip_gib": made.hbm if made is not None else None,
            "workers": here.workers,
            "worker": here.worker,
            "spot": here.spot,
            "processors": here.processors,
            "memory": {"free": self.room.memory, "needed": self.room.needed},
            "disk": {"runs": self.room.runs, "free": self.room.disk, "shm": self.room.shm},
            "compile_cache": {"folder": self.room.cache, "size": self.room.cached},
            "seconds_left": self.room.left,
            "quota": asdict(self.quota) if self.quota is not None else None,
            "price": asdict(self.price) if self.price is not None else None,
            "metadata_server": here.metadata.state,
            "held_by": [
                {"pid": one.pid, "kind": one.kind, "user": one.user, "command": one.command}
                for one in self.holding.holders
            ],
            "credentials": [{"service": c.service, "place": c.place} for c in self.credentials],
            "versions": self.packages.shown(),
            "problems": [problem.to_json() for problem in self.problems],
            "advice": [problem.to_json() for problem in self.advice],
            "signs": list(here.signs),
        }


def look(
    env: Mapping[str, str],
    *,
    runs: Path,
    cores: int | None = None,
    root: Path | None = None,
    path: Sequence[str] | None = None,
    python: tuple[int, ...] = (),
    imported: Mapping[str, Any] | None = None,
    told: Metadata | None = None,
    quota: Callable[[], Quota | None] = lambda: None,
) -> Report:
    """Look at everything. `cores`: what was chosen, if it was. `imported`: the kernel's modules.
    `told`: what the metadata server has said, if it was asked before. `quota`: gives the answer
    of a platform that was asked for it.

    `root`, `path` and `python` are those of another machine and interpreter, for tests.
    """
    root = machine.root_of(env) if root is None else root
    asked = None
    if told is None:  # it answers while the rest is looked at
        asked = metadata.Questions(env, root, chips.on_the_bus(root)[0])
    have = versions.installed(path, python)
    holding = holders.look(root)
    found = credentials.find(env)
    if asked is not None:
        told = asked.answers()
    here = machine.judge(env, root, told or Metadata())
    chosen = cores or here.default_cores
    began = resources.session_began(root)
    room = resources.look(here, env, root, runs, chosen, began)

    def all_problems() -> Iterator[Problem]:
        yield from hardware.problems(here, holding, env, root, chosen)
        if path is None:
            yield from clashes.half_installed(here, have)
        yield from clashes.problems(have, here, env, imported)
        yield from resources.problems(room, chosen)
        yield from credentials.problems(found)

    problems = tuple(all_problems())
    return Report(
        here,
        chosen,
        holding,
        have,
        room,
        tuple(found),
        tuple(problem for problem in problems if problem.must),
        tuple(problem for problem in problems if not problem.must),
        prices.of(here),
        quota(),
    )
