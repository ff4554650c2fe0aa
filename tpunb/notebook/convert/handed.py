"""What a train cell brings into the notebook, in the scripts of later ones.

In a run it is read from the run folder of the earlier run. A script that runs by itself has no run
folder: there the earlier train cell runs in its place, on every rank, and then all ranks get what
rank 0 would have returned, as the notebook did.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tpunb.notebook.convert.cells import EditedCell
from tpunb.notebook.convert.statements import (
    FunctionOrClass,
    ImportedNames,
    bound_names,
    executed,
    stands_alone,
)
from tpunb.notebook.models import Handed, LeftOut
from tpunb.utils.options import join_lists

_ATTACH = re.compile(r"^(?P<indent>\s*)(?:(?P<name>\w+)\s*=\s*)?%tpu_attach\b")
"""A line with `%tpu_attach`, and the name to which its value is assigned."""
_TRAIN = "%%tpu_train"
ENDED = "_ended"
"""What `tpunb.runs.ended` is called in the script of a run."""
IMPORT = f"from tpunb.runs import ended as {ENDED}"
_VARIABLES = re.compile(r"[^\W\d]\w*(,[^\W\d]\w*)*")


class TrainLine(NamedTuple):
    """What the option line of a train cell says about its values."""

    returns: tuple[str, ...] = ()
    out: str | None = None
    unclear: bool = False
    """Values are named by variables, `--returns {names}`."""

    @property
    def names(self) -> tuple[str, ...]:
        """All variables that it binds in the notebook."""
        return (*self.returns, *([self.out] if self.out else []))


def train_line(source: str) -> TrainLine:
    """The option line in the source of a train cell, as far as it can be read without a kernel."""
    line = next((line for line in source.splitlines() if line.startswith(_TRAIN)), "")
    return _option_line(line.removeprefix(_TRAIN))


def _option_line(line: str) -> TrainLine:
    try:
        words = join_lists(shlex.split(line), ("--returns",))
    except ValueError:  # a quote without its other half
        return TrainLine()
    values: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name in ("--returns", "--out"):
            values[name] = (value if equals else following).replace(" ", "")
    unclear = any(not _VARIABLES.fullmatch(value.strip(",")) for value in values.values())
    if unclear:
        return TrainLine(unclear=True)
    returns = tuple(name for name in values.get("--returns", "").split(",") if name)
    return TrainLine(returns, values.get("--out"))


def read_back(handed: Handed) -> list[str]:
    """Lines that bind what the kernel has got, in the script of a run."""
    lines = [IMPORT]
    for run in handed.runs:
        given, value = ", ".join(map(repr, (run.folder, *run.names))), "_run"
        if run.handle:
            raises = "" if run.raises else ", raises=False"
            lines.append(f"{run.out} = {ENDED}.EndedRun({given}{raises})")
            value = f"{run.out}.result"
        else:
            lines.append(f"_run = {ENDED}.read_run({given})")
        lines += [f"{name} = {value}.returns[{name!r}]" for name in run.names if name != run.out]
        if run.out is not None and not run.handle:
            lines.append(f"{run.out} = _run")
    return lines


def runs_read(script: str) -> list[str]:
    """The folders of the runs that a script reads values from."""
    found = re.findall(rf"\b{ENDED}\.(?:read_run|EndedRun)\(('(?:[^'\\]|\\.)*')", script)
    return list(dict.fromkeys(ast.literal_eval(text) for text in found))


def assign(values: Mapping[str, str]) -> str:
    """A line that binds names to expressions with `ENDED`."""
    return "; ".join([IMPORT, *(f"{name} = {value}" for name, value in values.items())])


def put_for_attach(source: str, handed: Handed | None) -> str:
    """A cell with what its `%tpu_attach` has brought in the place of that line.

    With None in a script by itself, where the run that it names has run above.
    """
    lines = source.split("\n")
    for index, line in enumerate(lines):
        if match := _ATTACH.match(line):
            code = [] if handed is None else read_back(handed)
            out = None if handed is not None else _option_line(line[match.end() :]).out
            code += [f"{name} = _run" for name in (match["name"], out) if name]
            if code:
                lines[index] = match["indent"] + "; ".join(code)
    return "\n".join(lines)


def in_place(lines: Iterable[str], options: TrainLine) -> list[str]:
    """The body of a train cell between the lines that a script needs around it."""
    head = f"# magic: {_TRAIN}"
    body = [f"_before = _random_states()  {x}" if x.startswith(head) else x for x in lines]
    if not any(line.startswith("_before") for line in body):
        return body  # another magic has taken all of the cell
    names = ", ".join(map(repr, options.returns))
    body.append(f"_run = _from_rank_0(_before{', ' if names else ''}{names})")
    body += [f"{name} = _run.returns[{name!r}]" for name in options.returns]
    return [*body, *([f"{options.out} = _run"] if options.out else [])]


KNOWN = ("state", "world_size", "returns", "failure", "failures", "result", "wait", "stop")
"""What a script by itself knows of an earlier train cell's run; the rest is in the run folder."""
_SHOW = ("print", "display", "plt", "sns", "tpunb")
"""Where calls begin that only show."""


def is_train_cell(source: str) -> bool:
    """Whether plain Python was made of a train cell."""
    return f"# magic: {_TRAIN}" in source


def leave_out_looks(
    cell: EditedCell, tree: ast.Module, imports: ImportedNames, runs: set[str], lost: set[str]
) -> None:
    """Leave out the statements of a cell that show, or name, what is in a run folder only.

    `runs` are names of results; `lost` grows by the names that are not made any more, whose looks
    are left out too. Raises RunFolderError where a statement may do more than to look.
    """
    for node in tree.body:
        if isinstance(node, FunctionOrClass):
            continue
        parts = list(executed(node))
        used = next(filter(None, (_in_folder(part, imports, runs) for part in parts)), None)
        if used is None and not any(isinstance(p, ast.Name) and p.id in lost for p in parts):
            continue
        shows = isinstance(node, ast.Expr) and _root(node.value) in {*_SHOW, *runs, *lost}
        named = isinstance(node, ast.Assign) and all(isinstance(x, ast.Name) for x in node.targets)
        if (shows or named) and stands_alone(cell.lines, node):
            names = bound_names(ast.Module([node], []))
            lost |= names
            first, last = node.lineno - 1, node.end_lineno or node.lineno
            cell.lose(first + 1, cell.lines[first], names)
            cell.drop(first, last - first, LeftOut.RUN_FOLDER)
        elif used is not None:
            raise RunFolderError(used, node.lineno)


class RunFolderError(Exception):
    """A statement needs a run folder, and is more than a look at it."""

    def __init__(self, used: str, line: int) -> None:
        super().__init__(
            f"`{used}` is in the folder of a run, and a script that runs by itself has none. "
            "Return what is needed with --returns, or tag the cell tpu-skip"
        )
        self.line = line


def _in_folder(node: ast.AST, imports: ImportedNames, runs: set[str]) -> str | None:
    """What an attribute reads of a run folder."""
    if not isinstance(node, ast.Attribute) or node.attr in (*KNOWN, "raise_for_failure"):
        return None
    value = node.value
    if isinstance(value, ast.Attribute) and value.attr == "result":
        value = value.value
    whose = imports.dotted(value)
    return f"{whose}.{node.attr}" if whose in {"tpunb.last_run", *runs} else None


def _root(node: ast.AST) -> str:
    """The name at the beginning of `a.b(c)[d].e()`."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


CALL_HELPER = "_launch"
"""What `tpunb.launch` is called in a script that runs by itself."""

CALL_HERE = '''\


def _launch(fn, args=(), **options):
    """Call a function on every rank, as tpunb.launch did; all ranks get what rank 0 returned."""
    global _launched
    before = _random_states()
    _launched = fn(*args)
    run = _from_rank_0(before, "_launched")
    run.returns = {"value": run.returns["_launched"]}
    return run
'''

HELPER = "_from_rank_0"
"""The name of the helper below in `header.HELPERS`."""

FROM_RANK_0 = '''\


def _random_states():
    """The states of all random numbers, which a train cell of the notebook did not change."""
    import os
    import random
    import sys

    import torch

    numpy, xm = sys.modules.get("numpy"), sys.modules.get("torch_xla.core.xla_model")
    seed = xm.get_rng_state() if xm and int(os.environ.get("WORLD_SIZE", 1)) > 1 else None
    return random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state(), seed


class _Run:
    """What a script knows of a train cell that has run in it."""

    def __init__(self, world_size, returns):
        self.state, self.world_size, self.returns = "succeeded", world_size, returns
        self.failure, self.failures, self.result = None, (), self

    def wait(self, timeout=None):
        return self

    def stop(self):
        return self

    def raise_for_failure(self):
        pass

    def __getattr__(self, name):
        raise AttributeError(f"{name!r} is in a run's folder, and a script by itself has none")


def _from_rank_0(before, *names):
    """End a train cell: all ranks get these values of rank 0, on the CPU and as copies."""
    import datetime
    import io
    import os
    import pickle
    import random
    import sys
    import types

    import torch

    class ToCpu(pickle.Pickler):
        def reducer_override(self, value):
            if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
                return NotImplemented
            copy = value.detach().cpu()
            if isinstance(value, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=value.requires_grad)
            return copy.__reduce_ex__(pickle.DEFAULT_PROTOCOL)

    to_cpu = types.ModuleType("pickle_to_cpu")
    to_cpu.__dict__.update(vars(pickle), Pickler=ToCpu)
    rank, world_size = (int(os.environ.get(*pair)) for pair in (("RANK", 0), ("WORLD_SIZE", 1)))
    _from_rank_0.calls = getattr(_from_rank_0, "calls", 0) + 1
    size = 4 << 20  # of a message to torch's store
    if world_size > 1:
        if "torch_xla" in sys.modules:  # what rank 0 reads may wait for the other ranks
            sys.modules["torch_xla"].sync(wait=True)
        patience = datetime.timedelta(days=30)
        store, _, _ = next(torch.distributed.rendezvous("env://", timeout=patience))
    returns = {}
    for name in names:
        key, data = f"train cell {_from_rank_0.calls}/{name}", b""
        if rank == 0:
            if name not in globals():
                raise NameError(f"rank 0 has no variable {name!r} after the train cell")
            buffer = io.BytesIO()
            torch.save(globals()[name], buffer, pickle_module=to_cpu)
            data = buffer.getvalue()
        if world_size > 1 and rank == 0:
            for at in range(0, len(data), size):
                store.set(f"{key}/{at}", data[at : at + size])
            store.set(key, str(len(data)))
        elif world_size > 1:
            length = int(store.get(key))
            data = b"".join(store.get(f"{key}/{at}") for at in range(0, length, size))
        if world_size > 1 and store.add(f"{key}/got", 1) == world_size:
            for at in range(0, len(data), size):
                store.delete_key(f"{key}/{at}")
        returns[name] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    if torch.distributed.is_initialized():  # the next train cell makes its own
        torch.distributed.destroy_process_group()
    python, on_cpu, numpy, seed = before
    random.setstate(python)
    torch.set_rng_state(on_cpu)
    if numpy:
        sys.modules["numpy"].random.set_state(numpy)
    if seed is not None:
        sys.modules["torch_xla.core.xla_model"].set_rng_state(seed)
    run = _Run(world_size, returns)
    if sys.modules.get("tpunb"):
        sys.modules["tpunb"].last_run = run
    return run
'''
