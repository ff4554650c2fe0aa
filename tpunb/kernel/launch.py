"""`tpunb.launch`: run a function of the notebook on every core, from a plain cell or a loop."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpunb.runs import callbacks
from tpunb.runs.callbacks import Callback
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
    kwargs: Mapping[str, Any] | None = None,
    *,
    on_log: Callback | None = None,
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
    """Run `fn(*args, **kwargs)` on every core, as a `%%tpu_train` cell would; wait for its end.

        for rate in (0.1, 0.01):
            result = tpunb.launch(train, args=(rate,), cores=4)
            print(rate, result.value)

    The ranks call the function as the notebook's cells define it: the prelude consists of the
    cells above the running one, and of the statements above the call in the running cell. The
    function is found by its name in the notebook or in a module. Pass values that differ between
    runs in `args` and `kwargs`, which come from the kernel (tensors reach the ranks on the CPU).
    The options are those of `%%tpu_train`; `name` defaults to the function's name, `raises=False`
    is `--no-raise`.

    `on_log(values, step)` is called with the metrics of `tpunb.log` while the run lasts, as by
    `tpunb.on_log`. An exception that it raises stops the run, and `launch` raises it.

    The result's `value` is what the function returned on rank 0. An interrupt
    stops the run, and ends a loop too: it raises KeyboardInterrupt.

    In a process that already is one core (a rank, a `%%tpu_debug` cell, a script, under torchrun)
    the function is called in this process, and `value` is what it returned here.

    Raises UsageError for wrong options and HandoffError for a function or an argument that cannot
    be passed to the ranks, before anything starts; the errors of `%%tpu_train` for the notebook;
    RunError if the run fails.
    """
    given = dict(locals())
    called = partial(fn, **kwargs) if kwargs else fn
    here = name or str(getattr(fn, "__name__", "launch"))
    launchers = sys.modules.get("tpunb.backends.launchers")
    if launchers is not None and launchers.are_redirected():
        return _call_here(called, args, on_log, here, cores)
    if env_vars.RUN in os.environ:
        raise TpunbError(
            "tpunb.launch was called in the prelude of a run, which cannot start runs of its own: "
            "call it in a cell of its own, or begin the cell with `# tpu: skip`"
        )
    shell = _shell()
    if shell is None:
        return _call_here(called, args, on_log, here, cores)
    from tpunb.kernel import calls, magics
    from tpunb.notebook.models import LaunchCall

    for own in ("fn", "args", "kwargs", "on_log", "raises"):
        del given[own]
    options = _options(**given | {"name": name or calls.name_of(fn), "no_raise": not raises})
    lines = _lines_of_cell(shell)
    call = calls.write_call(called, args, shell.user_ns)
    session = magics.load_session(shell)
    line = cell_line(session.history.executions()[-1].source, lines)
    call_of = LaunchCall(line, call.source, call.by_file, call.plain)
    return session.launch(options, call_of, on_log)


def _shell() -> InteractiveShell | None:
    """Return the IPython shell of this process; None in a plain script."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def _options(env: Mapping[str, object] | None = None, **given: Any) -> LaunchOptions:
    """Return the options of a run, each checked as in an option line."""
    from IPython.core.error import UsageError

    from tpunb.kernel.options import LaunchOptions
    from tpunb.utils.options import declarations

    for item, declared in declarations(LaunchOptions):
        parse = declared.keywords.get("type")
        if parse is not None and given.get(item.name) is not None:
            try:
                given[item.name] = parse(str(given[item.name]))
            except argparse.ArgumentTypeError as error:
                raise UsageError(f"tpunb.launch({item.name}=): {error}") from None
    variables = tuple((str(name), str(value)) for name, value in (env or {}).items())
    for name, _ in variables:
        if not name or "=" in name:
            raise UsageError(f"tpunb.launch(env=): {name!r} is not a valid variable name")
    return LaunchOptions(**given, env=variables)


def _lines_of_cell(shell: InteractiveShell) -> list[int]:
    """Return the current lines of code at the notebook's top level, outermost first.

    There is more than one below a magic that runs code, such as %%time. Raises UsageError if no
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
            f"tpunb.launch was called in {where}, where no cell is running, so it is unknown which "
            "cells the run needs: call it in a cell"
        )
    return lines[::-1]


def cell_line(source: str, lines: Sequence[int]) -> int:
    """Return the current line of a cell, from 1, given the lines of `_lines_of_cell`.

    IPython counts the lines of the text that it compiles: without blank lines at the top, and
    below a cell magic from the next line on.
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
    fn: Callable[..., Any],
    args: Sequence[Any],
    on_log: Callback | None,
    name: str,
    cores: Cores | None,
) -> RunResult:
    """Call the function in this process, which is one core."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if cores not in (None, "all", world_size) and os.environ.get("RANK", "0") == "0":
        run = "rank runs" if world_size == 1 else "ranks run"
        print(f"cores={cores} is ignored: {world_size} {run}", flush=True)
    here = rank_of_run()
    started = time.time()
    with callbacks.calling(on_log):
        value = fn(*args)
    return RunResult(
        state=RunState.SUCCEEDED,
        name=name,
        world_size=world_size,
        device="TPU" if os.environ.get("PJRT_DEVICE") == "TPU" else "CPU",
        started=started,
        ended=time.time(),
        dir=Path.cwd() if here is None else here.run.path,
        returns={"value": value},
    )
