"""`tpunb.launch`: a function of the notebook on every core, from a plain cell, also in a loop."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpunb.runs.directory import rank_of_run
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunState
from tpunb.utils import env_vars
from tpunb.utils.errors import TpunbError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from tpunb.kernel.options import Cores, LaunchOptions


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    cores: Cores | None = None,
    on: str | None = None,
    name: str | None = None,
    env: Mapping[str, str] | None = None,
    ranks: str = "all",
    timeout: float | str | None = None,
    hang_timeout: float | str = 300.0,
    grace: float | str = 15.0,
    retries: int = 0,
    resume: str | None = None,
    raises: bool = True,
    yes: bool = False,
    cold: bool = False,
    replay: bool = False,
    replicate: bool = False,
    profile: str | None = None,
) -> RunResult:
    """Run `fn(*args)` on every core, as a `%%tpu_train` cell would, and wait for the end.

        for rate in (0.1, 0.01):
            result = tpunb.launch(train, args=(rate,), cores=4)
            print(rate, result.returns["value"])

    The ranks call the function as the notebook's cells define it: the prelude are the cells above
    the one that is running, and of this one the statements above the call. The function is found
    by its name in the notebook or in a module; what tells runs apart goes into `args`, which are
    the kernel's own values (tensors reach the ranks on the CPU). Options are those of
    `%%tpu_train`: `name` is the function's if it is not given, `raises=False` is `--no-raise`.

    The result's `returns["value"]` is what the function returned on rank 0. An interrupt stops the
    run, and leaves a loop: it raises KeyboardInterrupt.

    In a process that is one core already (a rank, a `%%tpu_debug` cell, a script, under torchrun)
    it calls the function here, and `returns["value"]` is this process's own value.

    Raises UsageError for options, and HandoffError for a function or an argument that cannot reach
    the ranks, before anything starts; what `%%tpu_train` raises for the notebook; RunError if the
    run fails.
    """
    launchers = sys.modules.get("tpunb.xla.launchers")
    if launchers is not None and launchers.are_redirected():
        return _call_here(fn, args, name, cores)
    if env_vars.RUN in os.environ:
        raise TpunbError(
            "tpunb.launch was called while the cells above a train cell run for its ranks, which "
            "cannot start runs of their own: call it in a cell of its own, or begin the cell with "
            "`# tpu: skip`"
        )
    shell = _shell()
    if shell is None:
        return _call_here(fn, args, name, cores)
    from tpunb.kernel import calls, magics
    from tpunb.notebook.models import LaunchCall

    options = _options(
        cores=cores,
        on=on,
        name=name or calls.name_of(fn),
        env=tuple((key, str(value)) for key, value in (env or {}).items()),
        ranks=ranks,
        timeout=timeout,
        hang_timeout=hang_timeout,
        grace=grace,
        retries=retries,
        resume=resume,
        no_raise=not raises,
        yes=yes,
        cold=cold,
        replay=replay,
        replicate=replicate,
        profile=profile,
    )
    lines = _lines_of_cell(shell)
    call = calls.write_call(fn, args, shell.user_ns)
    session = magics.load_session(shell)
    line = cell_line(session.history.executions()[-1].source, lines)
    return session.launch(options, LaunchCall(line, call.source, call.by_file, call.plain))


def _shell() -> InteractiveShell | None:
    """The IPython shell of this process; None in a plain script."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def _options(**given: Any) -> LaunchOptions:
    """The options of a run, each checked as if it stood in an option line."""
    from IPython.core.error import UsageError

    from tpunb.kernel.options import LaunchOptions
    from tpunb.utils.options import declarations

    for item, declared in declarations(LaunchOptions):
        parse = declared.keywords.get("type")
        if item.name != "env" and parse is not None and given.get(item.name) is not None:
            try:
                given[item.name] = parse(str(given[item.name]))
            except argparse.ArgumentTypeError as error:
                raise UsageError(f"tpunb.launch({item.name}=): {error}") from None
    return LaunchOptions(**given)


def _lines_of_cell(shell: InteractiveShell) -> list[int]:
    """The lines at which code at the notebook's top level stands now, the outermost first.

    There is more than one below a magic that runs code, such as %%time. Raises UsageError where no
    cell is running in this thread.
    """
    from IPython.core.error import UsageError

    lines = [
        line
        for frame, line in traceback.walk_stack(sys._getframe(2))
        if frame.f_code.co_name == "<module>" and frame.f_globals is shell.user_global_ns
    ]
    if not lines:
        main = threading.current_thread() is threading.main_thread()
        where = "a callback" if main else "a thread"
        raise UsageError(
            f"tpunb.launch: this is {where}, and which cells a run needs follows from the cell "
            "that is running: call it in a cell"
        )
    return lines[::-1]


def cell_line(source: str, lines: Sequence[int]) -> int:
    """The line of a cell (from 1) at which it stands, from those of `_lines_of_cell`.

    IPython counts the lines of what it compiles: without blank lines at the top, and below a cell
    magic from the next line on.
    """
    text = source.split("\n")
    top = 0
    for line in lines:
        while top < len(text) and not text[top].strip():
            top += 1
        if top == len(text) or not text[top].startswith("%%"):
            return min(top + line, len(text))
        top += 1
    return top


def _call_here(
    fn: Callable[..., Any], args: Sequence[Any], name: str | None, cores: Cores | None
) -> RunResult:
    """Call the function in this process, which is one core."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if cores not in (None, "all", world_size) and os.environ.get("RANK", "0") == "0":
        run = "rank runs" if world_size == 1 else "ranks run"
        print(f"cores={cores} is ignored: {world_size} {run}", flush=True)
    here = rank_of_run()
    started = time.time()
    value = fn(*args)
    return RunResult(
        state=RunState.SUCCEEDED,
        name=name or str(getattr(fn, "__name__", "launch")),
        world_size=world_size,
        device="TPU" if os.environ.get("PJRT_DEVICE") == "TPU" else "CPU",
        started=started,
        ended=time.time(),
        dir=Path.cwd() if here is None else here.run.path,
        returns={"value": value},
    )
