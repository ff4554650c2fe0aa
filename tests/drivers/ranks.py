"""Rehearsal ranks for tests, forked from a process that has imported torch, and torch_xla if any.

`python -m tests.drivers.ranks` is that process. It serves torch elastic's store, as an agent
does, and for each line of JSON on its input forks ranks that call a function of a test module.
Tests get it as the fixture `ranks`, one for the whole session: each order has ranks and keys in
the store of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TIMEOUT = 120.0
"""Seconds after which ranks are killed, so that a hang fails its test."""


class Ended(NamedTuple):
    """How one rank ended."""

    value: Any
    error: str
    """The traceback, or ''."""
    exitcode: int
    output: str
    """What it wrote to stdout."""


class Ranks:
    """The warm process. `pid`: its process id."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self.pid = process.pid
        self._folder = folder
        self._runs = 0

    def run(self, function: Any, count: int, *args: object, **env: str) -> list[Ended]:
        """Call a module's function in `count` ranks and return how each ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._runs += 1
        folder = self._folder / str(self._runs)
        folder.mkdir()
        order = [function.__module__, function.__name__, count, str(folder), args, env]
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        ended = []
        for rank, code in enumerate(json.loads(self._process.stdout.readline())):
            result, stacks = folder / f"result{rank}", folder / f"stacks{rank}"
            if result.exists():
                value_and_error = pickle.loads(result.read_bytes())
            else:
                value_and_error = None, f"exit code {code}\n{stacks.read_text()}"
            ended.append(Ended(*value_and_error, code, (folder / f"stdout{rank}").read_text()))
        return ended

    def values(self, function: Any, count: int, *args: object, **env: str) -> list[Any]:
        """Like `run`, and return the ranks' values. Fails if one of them failed."""
        ended = self.run(function, count, *args, **env)
        failed = [f"rank {rank}:\n{e.error}" for rank, e in enumerate(ended) if e.error]
        assert not failed, "\n".join(failed)
        return [e.value for e in ended]


@contextlib.contextmanager
def warm(folder: Path, python: Path | str = sys.executable) -> Iterator[Ranks]:
    """Start the warm process, and end it. `python`: of an environment, if not of this one."""
    process = subprocess.Popen(
        [str(python), "-m", __name__],
        env={**os.environ, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:  # at its end, the closed pipe ends the process
        yield Ranks(process, folder)


def _serve() -> None:
    import torch.distributed as dist

    if importlib.util.find_spec("torch_xla") is not None:
        import torch_xla.core.xla_model
        import torch_xla.distributed.parallel_loader
        import torch_xla.distributed.xla_multiprocessing  # noqa: F401

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for number, line in enumerate(sys.stdin):
        module, name, count, folder, args, env = json.loads(line)
        function = getattr(importlib.import_module(module), name)
        pids = []
        # Ranks start when all are forked: a fork while the store's thread serves an earlier rank
        # can leave the child with a lock that nobody releases (3 of 434 rounds; now 0 of 507).
        gate, opens = os.pipe()
        board = os.memfd_create("board")
        for rank in range(count):
            pid = os.fork()
            if pid == 0:
                os.close(opens)
                os.read(gate, 1)
                os.environ.update(
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE=str(count),
                    LOCAL_WORLD_SIZE=str(count),
                    GROUP_RANK="0",
                    GROUP_WORLD_SIZE="1",
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(store.port),
                    TORCHELASTIC_RUN_ID="test",
                    # Keeps the keys of one order apart from those of the next.
                    TORCHELASTIC_RESTART_COUNT=str(number),
                    TORCHELASTIC_USE_AGENT_STORE="True",
                    TPUNB_BOARD=str(board),
                    **env,
                )
                _rank(function, rank, Path(folder), args)
            pids.append(pid)
        os.close(opens)
        os.close(gate)
        os.close(board)
        codes = _wait(pids)
        print(json.dumps(codes), flush=True)
    os._exit(0)  # a normal exit of the interpreter takes seconds


def _wait(pids: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + TIMEOUT
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, 9)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def _rank(function: Any, rank: int, folder: Path, args: list[Any]) -> None:
    code, result = 1, (None, "ended early")
    try:
        os.dup2(os.open(folder / f"stdout{rank}", os.O_WRONLY | os.O_CREAT), 1)
        stacks = open(folder / f"stacks{rank}", "w")  # noqa: SIM115 - the watchdog keeps it
        faulthandler.dump_traceback_later(TIMEOUT / 2, file=stacks)
        result = (function(*args), "")
        code = 0
    except BaseException:
        result = (None, traceback.format_exc())
    finally:
        sys.stdout.flush()
        (folder / f"result{rank}").write_bytes(pickle.dumps(result))
        os._exit(code)


def rehearse(
    module: str = "tpunb.backends.xla.rehearsal.install_xla", **options: Any
) -> tuple[int, int]:
    """In a rank: install the rehearsal of a backend as a run does; return rank and world size."""
    install = importlib.import_module(module)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    install.install_rehearsal(rank, world, **options)
    return rank, world


if __name__ == "__main__":
    _serve()
