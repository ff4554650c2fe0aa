"""`tpunb.save` and `tpunb.load`: checkpoints that are whole or not there.

Nothing here waits for another rank: a rank that saves while the others are gone has saved.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import operator
import os
import pickle
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpunb.errors import CheckpointError
from tpunb.rundir import RunDir
from tpunb.training import checkpoint_device, checkpoint_files, checkpoint_format
from tpunb.training.checkpoint_files import Found, Place, place
from tpunb.training.timing import counted_as_saving

KEEP = 3
"""Checkpoints that stay when a new one is whole, itself among them."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Checkpoint:
    """What `tpunb.load` found. `checkpoint["model"]` is `checkpoint.state["model"]`.

    It unpacks into what was given to save: `state, step = checkpoint`.
    """

    state: Any = field(repr=False)
    """As it was saved, with tensors on the CPU."""
    step: int
    path: str
    """The file, or its URL."""

    def __getitem__(self, key: Any) -> Any:
        return self.state[key]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.state, self.step))


@counted_as_saving()
def save(state: Any, step: int, *, per_rank: bool = False, to: str | Path | None = None) -> None:
    """Write a checkpoint: dicts, lists, tensors, numbers, state_dict()s, as torch.save takes it.

    Call it in every rank. Rank 0 writes its state, for all; with `per_rank` each writes its
    own, and the checkpoint is whole when all have. The others go on at once: nobody waits for
    another rank. It is on the disk when the call returns, and the last KEEP stay.

    With several ranks, the one that the attempt began from stays too.

    `to`: a folder, or a URL that fsspec knows. Without it: TPUNB_CHECKPOINTS, else the run's
    folder, outside a run `./checkpoints`.

    Raises CheckpointError if it could not be written; earlier ones are as they were then.
    """
    step = _step(step)
    rank, ranks = _who()
    checkpoint_device.settle()
    _this_process().saves = True
    if rank and not per_rank:
        return
    folder = _place(_default() if to is None else to)
    part = None
    if per_rank:
        counts = _this_process().parts
        counts[folder.shown] = counts.get(folder.shown, -1) + 1
        part = counts[folder.shown], rank, ranks
    to_cpu = checkpoint_device.ToCpu(state)
    path = folder.shown
    try:
        number = max((one.number for one in _found(folder)), default=0) + 1
        name = checkpoint_files.name_of(number, step, _group(), part)
        path = folder.at(name)
        with folder.write(name) as file:
            checkpoint_format.write(state, file, name, to_cpu)
    except Exception as error:
        if not isinstance(error, OSError):
            guilty = checkpoint_format.culprit(state, to_cpu)
            if guilty is not None:
                raise CheckpointError(_unpicklable(*guilty, error, step, folder), path) from error
        raise CheckpointError(_unwritten(error, step, folder, path, to_cpu.size), path) from error
    try:
        checkpoint_files.remove_old(folder, KEEP, _group(), ranks == 1)
    except Exception as error:  # of any kind in a bucket; not worth ending a training for
        _tell("save", f"old checkpoints stay in {folder.shown}: {_reason(error)}")


def load(
    from_: str | Path | None = None,
    *,
    step: int | None = None,
    rank: int | None = None,
    trusted: bool = False,
) -> Checkpoint | None:
    """The newest whole checkpoint, or None if there is none yet.

    Looks where `save` writes, and if there is none, where TPUNB_RESUME says (`--resume`).
    `from_`: another folder, a run's folder, or a URL. `step`: the newest of this step. `rank`:
    whose part, of a checkpoint with one for each rank (this rank's).

    Until a rank has called `save`, it does not see what its own attempt saves: so all ranks
    resume from the same step, also one that comes late.

    A file holds data only, unless it is `trusted`: then its classes are rebuilt as well, which
    can run code. In a run's own folder they always are.

    Raises CheckpointError if there is no such step, or if the checkpoint needs to be trusted,
    or was saved by another number of ranks.
    """
    hidden = None
    if step is not None:
        step = _step(step)
    elif not _this_process().saves and _knows_its_attempt():
        hidden = _group()
    resume = os.environ.get("TPUNB_RESUME")
    places = [_default() if from_ is None else from_]
    if from_ is None and resume:
        places.append(resume)
    folder = None
    for where in places:
        folder = _place(where)
        safe = trusted or (from_ is None and where == _run_folder())
        try:
            found = _newest(folder, step, hidden, rank, safe)
        except OSError as error:
            raise CheckpointError(
                f"tpunb.load: cannot read {folder.shown}: {error}", folder.shown
            ) from error
        if found is not None:
            return found
    if step is not None and folder is not None:
        raise CheckpointError(
            f"tpunb.load: there is no whole checkpoint of step {step} in "
            f"{' or '.join(_place(where).shown for where in places)}",
            folder.shown,
        )
    if len(places) > 1:
        _tell("load", f"there is no whole checkpoint in TPUNB_RESUME={resume}")
    return None


def _newest(
    folder: Place, step: int | None, hidden: str | None, rank: int | None, trusted: bool
) -> Checkpoint | None:
    """The first whole one from the newest on; one line says which were not."""
    for _ in range(20):
        passed_over: list[str] = []
        try:
            for one in _found(folder):
                if one.group == hidden or step not in (None, one.step):
                    continue
                if one.missing:
                    lacks = [f"rank {number}" for number in one.missing]
                    passed_over.append(f"step {one.step} lacks the part of {', '.join(lacks)}")
                    continue
                checkpoint = _read(folder, one, rank, trusted, passed_over)
                if checkpoint is not None:
                    if passed_over:
                        _tell("load", f"{'; '.join(passed_over)}: taking step {one.step}")
                    return checkpoint
        except FileNotFoundError:
            continue  # removed since it was listed, so there are newer ones
        if passed_over:
            _tell("load", f"{'; '.join(passed_over)}: no older one in {folder.shown} is whole")
        return None
    raise CheckpointError(
        f"tpunb.load: the files in {folder.shown} vanish faster than they can be read",
        folder.shown,
    )


def _read(
    folder: Place, one: Found, rank: int | None, trusted: bool, passed_over: list[str]
) -> Checkpoint | None:
    """The state of a checkpoint, if all its parts are whole: all ranks decide alike."""
    mine = _part(folder, one, rank)
    with contextlib.ExitStack() as stack:
        for owner, name in one.names.items():
            file = folder.open(name)
            stack.callback(file.close)
            if not checkpoint_format.is_whole(file, name):
                passed_over.append(f"step {one.step} is cut off or changed ({folder.at(name)})")
                return None
            if owner == mine:
                own = file
        path = folder.at(one.names[mine])
        try:
            return Checkpoint(checkpoint_format.read(own, trusted), one.step, path)
        except pickle.UnpicklingError as error:
            names = ", ".join(checkpoint_format.more_than_data(own)) or str(error)
            raise CheckpointError(
                f"tpunb.load: {path} is more than data: to rebuild {names} can run code. If you "
                "know who wrote it: tpunb.load(trusted=True). If you save state_dict()s, tensors, "
                "numbers and strings, it needs no trust",
                path,
            ) from error
        except (AttributeError, ImportError) as error:
            raise CheckpointError(
                f"tpunb.load: {path} holds what this process does not know ({error}): define or "
                "import it above the call, as where it was saved",
                path,
            ) from error


def _part(folder: Place, one: Found, rank: int | None) -> int:
    if one.ranks is None:
        return 0
    own, ranks = _who()
    if rank is None and ranks != one.ranks:
        raise CheckpointError(
            f"tpunb.load: in {folder.shown} step {one.step} has a part for each of {one.ranks} "
            f"ranks, and this run has {ranks}: run it on {one.ranks} cores, or choose a part: "
            "tpunb.load(rank=0)",
            folder.shown,
        )
    if rank is not None and not 0 <= rank < one.ranks:
        raise CheckpointError(
            f"tpunb.load: step {one.step} has parts of ranks 0 to {one.ranks - 1}, not {rank}",
            folder.shown,
        )
    return own if rank is None else rank


def _found(folder: Place) -> list[Found]:
    return checkpoint_files.checkpoints(folder.list())


def _run_folder() -> str | None:
    run = os.environ.get("TPUNB_RUN")
    return str(RunDir(run).checkpoints) if run else None


def _default() -> str:
    return os.environ.get("TPUNB_CHECKPOINTS") or _run_folder() or "checkpoints"


def _place(where: str | Path) -> Place:
    try:
        return place(where)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}", str(where)) from error


def _step(step: int) -> int:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(step, torch.Tensor):
        # operator.index would start the computation of a lazy tensor and wait for it.
        raise TypeError("the step of a checkpoint must be an int, not a tensor")
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(
            f"the step of a checkpoint must be an int, not {type(step).__name__}: "
            "tpunb.save(state, step)"
        ) from None
    if number < 0:
        raise ValueError(f"the step of a checkpoint must not be negative, as {number} is")
    return number


def _who() -> tuple[int, int]:
    """This rank, and how many there are."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@dataclass
class _Process:
    """What this process remembers; a forked one begins anew."""

    saves: bool = False
    """It has called `save`."""
    parts: dict[str, int] = field(default_factory=dict)
    """The number of its last save with `per_rank` to each place."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)


_processes: dict[int, _Process] = {}


def _this_process() -> _Process:
    return _processes.setdefault(os.getpid(), _Process())


def _knows_its_attempt() -> bool:
    """Not under torchrun on several hosts, where a later run may look like the same."""
    env = os.environ
    return "TPUNB_RUN" in env or env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE")


def _group() -> str:
    """The same for all ranks of an attempt, and for no other.

    Under torchrun the run's id alone does not tell: it is "none" unless it is given. On one
    host the ranks' parent does.
    """
    env = os.environ
    if "TPUNB_RUN" in env:
        about = [env["TPUNB_RUN"], env.get("TPUNB_ATTEMPT", "0")]
    elif "TORCHELASTIC_RUN_ID" in env and "RANK" in env:
        about = [env["TORCHELASTIC_RUN_ID"], env.get("TORCHELASTIC_RESTART_COUNT", "0")]
        if env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE"):
            parent = Path(f"/proc/{os.getppid()}/stat").read_text()
            started = parent.rpartition(")")[2].split()[19]
            about += [str(os.getppid()), started]
    else:
        about = [_this_process().token]
    return hashlib.sha256("\0".join(about).encode()).hexdigest()[:8]


def _unpicklable(key: str, value: Any, error: Exception, step: int, folder: Place) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return (
        f"tpunb.save: state{key} is a {kind} and cannot be pickled ({type(error).__name__}: "
        f"{error}). Leave it out, or save what it is made of: tensors, numbers, a state_dict(). "
        f"Step {step} is not saved; {_intact(folder)}"
    )


def _unwritten(error: Exception, step: int, folder: Place, path: str, size: int) -> str:
    reason = _reason(error)
    if isinstance(error, OSError) and error.errno in _FULL:
        free = folder.free()
        there = "" if free is None else f", {_mega(free)} are free"
        reason += (
            f" (its tensors take {_mega(size)}{there}; there must be room for {KEEP} checkpoints "
            "and the one being written)"
        )
    return (
        f"tpunb.save: cannot write {path}: {reason}. Step {step} is not saved; {_intact(folder)}. "
        "Another place: tpunb.save(…, to=…) or the variable TPUNB_CHECKPOINTS"
    )


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)


def _intact(folder: Place) -> str:
    """'the checkpoints of steps 20 and 10 are intact in …', after a failure."""
    try:
        steps = [str(one.step) for one in _found(folder) if not one.missing]
    except Exception as error:  # the place is broken; what may be there is not touched
        return f"what was saved before is as it was ({type(error).__name__} when it was listed)"
    if not steps:
        return f"there is no earlier checkpoint in {folder.shown}"
    if len(steps) == 1:
        return f"the checkpoint of step {steps[0]} is intact"
    return f"the checkpoints of steps {', '.join(steps)} are intact"


def _mega(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size < 1e8 else f"{size / 1e6:.0f} MB"


def _tell(call: str, what: str) -> None:
    # On a full disk, or with a closed stderr, the checkpoint counts and not the line about it.
    with contextlib.suppress(OSError, ValueError):
        print(f"tpunb.{call}: {what}", file=sys.stderr, flush=True)
