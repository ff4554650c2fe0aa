"""The runner: a fork of the agent that runs the prelude once and forks the ranks.

Where every rank runs the prelude itself (replicate) it only forks them. Where the prelude does
what forbids a fork after it, the runner says so and ends, and the guard has the agent make
another one that replicates.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
from typing import Any, NoReturn

from tpunb import rundir
from tpunb.events import Phase
from tpunb.models import THREAD_VARIABLES, Block, RunSpec
from tpunb.rundir import RunDir
from tpunb.worker import cells, elastic, rank, spmd, stdio
from tpunb.worker.cells import Cells
from tpunb.worker.findings import Findings
from tpunb.worker.messages import Reporter

_RANK_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(order: dict[str, Any], report: Reporter) -> NoReturn:
    """Run what the order names, and end the process with the exit code of the run.

    SIGINT is blocked when this begins.
    """
    run = RunDir(order["dir"])
    spec = run.read_spec()
    code = 1
    try:
        code = _run(run, spec, order, report)
    except KeyboardInterrupt as error:
        cells.write(error, run, spec, 0, None)
        code = 130
    except BaseException as error:
        cells.write(error, run, spec, 0, None)
        cells.show(error, run, spec)
    finally:
        stdio.flush()
        os._exit(code)


def _run(run: RunDir, spec: RunSpec, order: dict[str, Any], report: Reporter) -> int:
    os.setsid()
    folder = run.attempt(0, None)
    stdio.redirect(folder / "prelude.log", folder / "prelude.log")
    faulthandler.enable(open(folder / "crash.txt", "w"), all_threads=False)  # noqa: SIM115
    rundir.keep_room(run.error(0, None))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    env: dict[str, str] = order["env"]
    # One thread for the libraries that the prelude loads, as for torch in the agent: what
    # starts threads of its own when it is loaded cannot be forked after.
    few = {} if order["replicate"] else dict.fromkeys(THREAD_VARIABLES, "1")
    os.environ.clear()
    os.environ.update({**env, **few})
    os.environ["TPUNB_RUN"] = str(run.path)
    os.chdir(spec.cwd)
    sys.path[1:] = [entry for entry in spec.sys_path if entry != sys.path[0]]
    script = Cells(run, spec)
    script.become_main()
    if order["replicate"] is None:
        finding = _prelude(run, spec, script, report)
        if finding is not None:
            report.tell("spoiled", reason=finding)
            return 0
    for name in few:
        os.environ.pop(name)
        if name in env:
            os.environ[name] = env[name]
    return _ranks(run, spec, script, report, replicate=order["replicate"] is not None)


def _prelude(run: RunDir, spec: RunSpec, script: Cells, report: Reporter) -> str | None:
    """Run the cells above the train cell; what one of them did that forbids a fork, or None."""
    findings = Findings()
    for block in script.of("header"):
        script.execute(block)
    for block in script.of("prelude"):
        report.tell("cell", number=block.number)
        run.emit(Phase(f"prelude, cell [{block.number}]"))
        _run_block(script, block)
        spmd.check_prelude(spec, block.number)
        if finding := findings.look():
            return f"cell [{block.number}] {finding}"
    findings.close()
    return None


def _run_block(script: Cells, block: Block) -> None:
    try:
        script.execute(block)
    except SystemExit as error:
        end = " ends the prelude before the train cell is reached"
        raise cells.named_exit(error, end) from None


def _ranks(run: RunDir, spec: RunSpec, script: Cells, report: Reporter, *, replicate: bool) -> int:
    # What the prelude has set for signals holds in the ranks; in this process they are the
    # guard's business from now on.
    handlers = {number: signal.getsignal(number) for number in _RANK_SIGNALS}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    runner, state = os.getpid(), random.getstate()

    def become(number: int, local_rank: int, attempt: int, env: dict[str, str]) -> NoReturn:
        task = rank.Assignment(
            run=run,
            spec=spec,
            cells=script,
            attempt=attempt,
            rank=number,
            local_rank=local_rank,
            local_world_size=int(env["LOCAL_WORLD_SIZE"]),
            env={**env, "TPUNB_ATTEMPT": str(attempt)},
            replicate=replicate,
            signals={n: h for n, h in handlers.items() if h is not None},
            random=state,
            runner=runner,
        )
        rank.main(task, report)

    run.emit(Phase("training"))
    return 0 if elastic.launch(spec.world_size, spec.retries, run, report, become) else 1
