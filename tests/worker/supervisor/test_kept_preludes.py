"""Copies that a supervisor accepts as kept preludes."""

from __future__ import annotations

import os
from pathlib import Path
from socket import socketpair

from tpunb.runs.directory import RunDir
from tpunb.runs.protocol import OrderChannel, PreludeKept
from tpunb.runs.spec import Block, RunSpec
from tpunb.utils.processes import Process
from tpunb.worker.supervisor.kept_preludes import KeptPreludes, PreludeInputs, Waiting


def copy(number: int, cells: int = 1) -> PreludeKept:
    """This process stands in for a copy, which gets no signals in this test."""
    return PreludeKept(os.getpid(), number, cells, seconds=1.0, modules={}, folders=[])


def _prepared(path: Path) -> tuple[RunDir, RunSpec]:
    folder = RunDir(path)
    folder.script.write_text("a = 1\nb = a\n")
    blocks = (Block("prelude", 1, 1, 0, 1), Block("train", 2, 2, 1, 2))
    spec = RunSpec("id", "run", 1, "CPU", str(path), (), blocks)
    folder.write_spec(spec)
    return folder, spec


def test_variables_that_trackers_set_for_themselves_change_no_prelude(tmp_path: Path) -> None:
    folder, spec = _prepared(tmp_path)

    def inputs(**env: str) -> PreludeInputs:
        return PreludeInputs.of_run(folder, spec, env, {})

    assert inputs(WANDB_SERVICE="1", _MLFLOW_TELEMETRY_SESSION_ID="1") == inputs()
    assert inputs(WANDB_PROJECT="digits") != inputs()


def test_prelude_copy_of_an_old_run_is_not_kept_for_the_next(tmp_path: Path) -> None:
    folder, spec = _prepared(tmp_path)
    kept = KeptPreludes()
    assert kept.begin(folder, spec, {}, print) == (None, spec)
    late = kept.next_copy
    pair = socketpair()
    server = Waiting(Process(1, 0), OrderChannel(pair[0]), 0)
    sockets = kept.make_sockets(server, 0)
    kept.close_sockets()
    kept.add(copy(late))
    assert kept.processes == []
    assert sockets[0].recv(1) == b""  # so the copy knows that no run will ask it
    sockets += kept.make_sockets(server, 1)
    kept.add(copy(late))
    assert (kept.processes, kept.fork_server) == ([], None)
    kept.add(copy(late + 1, cells=0))
    assert kept.processes == []
    assert kept.fork_server is not None
    kept.add(copy(late + 2))
    assert [process.pid for process in kept.processes] == [os.getpid()]
    kept.close_sockets()
    for end in [*pair, *sockets, kept.fork_server.channel, kept._kept[0].channel]:
        end.close()
