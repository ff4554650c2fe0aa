"""Child processes that a rank or an exported script starts by spawn or forkserver.

Such a child runs the file of its parent's main module again, which is the whole script. Here it
runs the script without the train cell, quietly, and then the train cell's imports, functions,
classes and constants. The methods are multiprocessing's, and so torch's and concurrent.futures'.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import process, spawn
from pathlib import Path
from typing import Any

from tpunb.backends import current, launchers
from tpunb.backends.base import RankSetup
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import Block, RunSpec
from tpunb.utils import env_vars, processes
from tpunb.utils.files import read_text
from tpunb.worker import cells, figures, replay, stdio

_MAIN = str(Path(__file__).with_name("child_main.py"))
_TITLE = re.compile(r"# %% (?:\[|cell [^\s,]+(?P<train>,)?)")
"""The title of a cell in an exported script; that of a train cell says more after a comma."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def leave_out_train_cell() -> None:
    """Let children of this process run the script without the train cell."""
    original = spawn.get_preparation_data

    def prepare(name: str) -> dict[str, Any]:
        data: dict[str, Any] = original(name)
        return data | ({"init_main_from_path": _MAIN} if "init_main_from_path" in data else {})

    spawn.get_preparation_data = prepare


def become_child(namespace: dict[str, Any]) -> None:
    """In a child: run the script without the train cell in the namespace of its main module.

    If that fails, the run fails.
    """
    processes.spawned_by_rank, here = True, os.getcwd()
    if os.environ.get("PJRT_DEVICE") == "TPU":  # the rank has the chip
        os.environ.update({"PJRT_DEVICE": "CPU", env_vars.DEVICE: "CPU"})
    if env_vars.RUN not in os.environ:  # the script's header prepares the process
        path = os.environ[env_vars.SCRIPT]
        # Where the script began: its lines change the folder as they did in the parent.
        os.chdir(process.ORIGINAL_DIR)  # type: ignore[attr-defined]
        with _quiet(), launchers.repeating():
            _execute(path, _train_lines(read_text(Path(path))), namespace, lambda error: None)
        os.chdir(here)
        return
    run = RunDir(os.environ[env_vars.RUN])
    spec, rank = run.read_spec(), int(os.environ["RANK"])
    attempt = int(os.environ[env_vars.ATTEMPT])
    fail = partial(cells.write_error, run=run, spec=spec, attempt=attempt, rank=rank)
    blocks = [block for block in spec.blocks if block.role == "train"]
    lines = {line for block in blocks for line in range(block.first, block.last + 1)}
    try:
        with _quiet(), launchers.repeating():
            _prepare(spec, fail)
            _execute(str(run.script), lines, namespace, fail, spec.blocks)
        os.chdir(here)
    except Exception as error:
        fail(error)
        cells.print_error(error, run, spec)
        raise SystemExit(1) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A block whose output is not shown: the rank has shown it."""
    kept = [os.dup(1), os.dup(2)]
    stdio.discard_output()
    try:
        yield
    finally:
        stdio.flush_output()
        for fd, copy in enumerate(kept, 1):
            os.dup2(copy, fd)
            os.close(copy)


def _prepare(spec: RunSpec, fail: Callable[[Exception], None]) -> None:
    """Give this process the rank's numbers and device, as far as a child may use them."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    numbers = {name.lower(): int(os.environ[name]) for name in names}
    figures.follow_figures()
    backend, device = current.backend(), current.device()
    for module in {*backend.modules} - {"torch._dynamo"}:  # which takes 2 s, for optimizers only
        importlib.import_module(module)
    backend.warm(device)
    backend.prepare(RankSetup(device, **numbers, spmd=spec.spmd))
    launchers.redirect_launchers(numbers["rank"], report=fail)


def _train_lines(text: str) -> set[int]:
    """The lines of the train cells of an exported script."""
    found, inside = set(), False
    for number, line in enumerate(text.split("\n"), 1):
        if title := _TITLE.match(line):
            inside = title["train"] is not None
        if inside:
            found.add(number)
    return found


def _execute(
    path: str,
    train: set[int],
    namespace: dict[str, Any],
    fail: Callable[[Exception], None],
    blocks: Sequence[Block] = (),
) -> None:
    """Run a script's statements, of those on the lines `train` the definitions only.

    What needs a name that only other statements bind is passed over, and named if a child needs it.
    `blocks`: the cells with their folders.
    """
    tree = ast.parse(read_text(Path(path)), path)
    replay.begin_cell(prelude=True)
    missing: set[str] = set()
    flags = 0
    left = list(blocks)
    for node in replay.tolerate_repetition(tree).body:
        while left and left[0].first <= node.lineno:
            if folder := left.pop(0).cwd:
                with contextlib.suppress(OSError):  # as in the rank, whose card notes it
                    os.chdir(os.path.expanduser(folder))
        launches = any(isinstance(n, ast.Name) and n.id == _LAUNCH for n in ast.walk(node))
        trains = node.lineno in train or launches
        if not trains or _is_definition(node):
            try:
                code = compile(ast.Module([node], []), path, "exec", flags, dont_inherit=True)
                flags |= code.co_flags & cells.FUTURE
                exec(code, namespace)
                continue
            except Exception as error:
                needs = isinstance(error, NameError) and error.name in missing
                if not (trains or needs):
                    raise
        missing |= _bound(node)
    replay.begin_cell(prelude=False)

    def find(name: str) -> Any:
        if name not in missing:
            raise AttributeError(f"module '__main__' has no attribute {name!r}")
        error = RuntimeError(
            f"a process that was started by spawn or forkserver needs {name!r}, which the train "
            "cell makes, and such a process only runs the cells above it: move it to a cell above"
        )
        fail(error)
        raise error  # pickle replaces an AttributeError by its own

    namespace.setdefault("__getattr__", find)


_LAUNCH = "_tpunb_launch"
"""The function that calls tpunb.launch's function in an exported script."""


def _is_definition(node: ast.stmt) -> bool:
    """True for an import, a function, a class, and a name with a plain value."""
    if isinstance(node, ast.Assign) and all(isinstance(each, ast.Name) for each in node.targets):
        with contextlib.suppress(ValueError):
            ast.literal_eval(node.value)
            return True
    return isinstance(node, (ast.Import, ast.ImportFrom, *_DEFINITIONS))


def _bound(node: ast.stmt) -> set[str]:
    nodes = [*ast.walk(node)]
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names | {n.name for n in nodes if isinstance(n, _DEFINITIONS)}
