"""`tpunb.save` and `tpunb.load`: checkpoints that are either whole or do not exist.

Nothing in this module waits for another rank: a rank can save after the others have ended.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pickle
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import IO, Any

from tpunb.backends.xla import tensors
from tpunb.runs import heartbeat, last_run
from tpunb.runs.directory import RunDir, rank_of_run
from tpunb.runs.events import Resumed
from tpunb.training.checkpoint import format, sharded
from tpunb.training.checkpoint.store import (
    CheckpointPart,
    Store,
    StoredCheckpoint,
    crc_in,
    file_name,
    group_files,
    next_number,
    open_store,
    remove_old,
)
from tpunb.training.ranks import launched_rank_and_world
from tpunb.utils import env_vars
from tpunb.utils.errors import CheckpointError
from tpunb.utils.files import append_text
from tpunb.utils.text import name_ranks, size

KEEP = 3
"""The number of checkpoints that are kept, including the newest."""
SHOWN = 3
"""The most skipped checkpoints that `load` describes."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    `checkpoint["model"]` is `checkpoint.state["model"]`, and `state, step = checkpoint` unpacks
    it into the arguments of `tpunb.save`.
    """

    state: Any = field(repr=False)
    """The saved state, with tensors on the CPU."""
    step: int
    """The step that it was saved with."""
    path: str
    """The path or URL of the file."""

    def __getitem__(self, key: Any) -> Any:
        return self.state[key]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.state, self.step))


@contextlib.contextmanager
def _timed() -> Iterator[None]:
    """Add the duration of the call to the run's time for checkpoints; do nothing outside a run."""
    began = time.perf_counter()
    try:
        yield
    finally:
        if (this := rank_of_run()) is not None:
            # On a full disk, the error of `save` matters and its duration does not.
            with contextlib.suppress(OSError):
                path = this.run.saving(this.attempt, this.rank)
                append_text(path, f"{time.perf_counter() - began:.3f}\n")


@_timed()
def save(state: Any, step: int, *, per_rank: bool = False, path: str | Path | None = None) -> None:
    """Write a checkpoint: `tpunb.save({"model": model.state_dict()}, step)`.

    Call it on every rank. Rank 0 writes its state for all ranks. With `per_rank`, and if the state
    has DTensors (of `fully_shard`, `parallelize_module`, `distribute_tensor`), each rank writes
    its own, and the checkpoint is complete once all ranks have. No rank waits for another. When the
    call returns, the checkpoint is on disk. The last 3 checkpoints are kept, and with several
    ranks also the one that the attempt resumed from.

    `state`: anything that torch.save accepts, usually a dict of state_dicts. `step`: an int from
    0 on. `path`: a folder, or a URL that fsspec supports; by default TPUNB_CHECKPOINTS, otherwise
    the run's folder in a run and `./checkpoints` elsewhere.

    Raises CheckpointError if the checkpoint cannot be written (earlier checkpoints stay intact),
    TypeError or ValueError for a step that is not an int or is negative.
    """
    step = _step(step)
    rank, ranks = launched_rank_and_world()
    tensors.start_pending_work()
    _this_process().saves = True
    per_rank |= sharded.has_shards_of_rank(state)
    in_parts = per_rank or (ranks > 1 and sharded.has_dtensors(state))
    if rank and not in_parts:
        return
    store = _store(_default() if path is None else path)
    part = None
    if in_parts:
        counts = _this_process().parts
        counts[store.location] = counts.get(store.location, -1) + 1
        part = CheckpointPart(counts[store.location], not per_rank, rank, ranks)
    state = sharded.pack(state, store.location)
    to_cpu = tensors.CpuCopies(state)
    from tpunb.backends import pickling  # imports torch

    try:
        with heartbeat.storing():
            number = next_number(store.list())

        def write(file: IO[bytes]) -> str:
            crc = pickling.write_value(state, file, to_cpu, whole=True)
            return file_name(number, step, _group(), part, crc)

        store.write(write)
    except Exception as error:
        message = _write_failure(error, step, store, to_cpu.size)
        raise CheckpointError(message, store.location) from error
    try:
        with heartbeat.storing():
            remove_old(store, KEEP, _group(), ranks == 1)
    except Exception as error:  # a bucket may raise anything; it must not end a training
        _report("save", f"cannot remove old checkpoints from {store.location}: {_reason(error)}")


def load(
    path: str | Path | None = None,
    *,
    step: int | None = None,
    rank: int | None = None,
    weights_only: bool = True,
) -> Checkpoint | None:
    """Return the newest complete checkpoint, or None if there is none yet.

        if (checkpoint := tpunb.load()) is not None:
            model.load_state_dict(checkpoint["model"])
            step = checkpoint.step + 1

    It searches where `save` writes and then, if that has no checkpoint, in TPUNB_RESUME
    (`--resume`). `path`: another folder, a run's folder, or a URL. `step`: return the newest
    checkpoint of this step. `rank`: the part of a `per_rank` checkpoint to load; by default this
    rank's. DTensors may be loaded with another number of ranks: they are DTensors of the mesh
    that this process has made (of the same names and number of dimensions, so load them after
    `fully_shard`), and whole tensors in a process without one, such as the kernel.

    Until a rank has called `save`, it does not see the checkpoints of its own attempt: so all
    ranks resume from the same step, even a rank that starts late.

    `weights_only`: accept only data, as in torch.load. With False, objects of any class are
    rebuilt, which can run code. In the run's own folder they always are.

    Raises CheckpointError if there is no such step, if files cannot be read, if the checkpoint
    holds more than data, or if a different number of ranks saved it.
    """
    hidden = None
    if step is not None:
        step = _step(step)
    elif not _this_process().saves and _knows_its_attempt():
        hidden = _group()
    resume = os.environ.get(env_vars.RESUME)
    paths = [_default() if path is None else path]
    if path is None and resume:
        paths.append(resume)
    locations = []
    for each in paths:
        store = _store(each)
        locations.append(store.location)
        in_own_folder = path is None and each == _run_folder()
        try:
            checkpoint = _newest(store, step, hidden, rank, weights_only and not in_own_folder)
        except OSError as error:
            raise CheckpointError(
                f"tpunb.load: cannot read {store.location}: {error}", store.location
            ) from error
        if checkpoint is not None:
            here = rank_of_run()
            if each == resume and path is None and here is not None and here.rank == 0:
                with contextlib.suppress(OSError):  # a full disk: the card does not show it
                    here.run.emit(Resumed(checkpoint.step))
            return checkpoint
    if step is not None:
        raise CheckpointError(
            f"tpunb.load: no complete checkpoint of step {step} in {' or '.join(locations)}",
            locations[-1],
        )
    last = last_run.result
    if path is None and last is not None and any(last.dir.glob("checkpoints/*.pt")):
        fix = "the last run's: tpunb.load(tpunb.last_run.dir)"
        _report("load", f"no checkpoint in {' or '.join(locations)}; {fix}")
    if len(paths) > 1:
        _report("load", f"no complete checkpoint in TPUNB_RESUME={resume}")
    return None


def _newest(
    store: Store, step: int | None, hidden: str | None, rank: int | None, weights_only: bool
) -> Checkpoint | None:
    """Return the newest whole checkpoint; print newer ones that are not whole on stderr."""
    for _ in range(20):
        skipped: list[str] = []
        try:
            for stored in _list(store):
                if stored.group == hidden or step not in (None, stored.step):
                    continue
                if stored.missing:
                    line = f"step {stored.step} is missing the part of rank "
                    line += name_ranks(stored.missing)
                    if stored.sharded:
                        line += " (every rank must call tpunb.save: each has a part of the model)"
                    skipped.append(line)
                    continue
                checkpoint = _read(store, stored, rank, weights_only, skipped)
                if checkpoint is not None:
                    if skipped:
                        _report_skipped(skipped, f"using step {stored.step}")
                    return checkpoint
        except FileNotFoundError:
            continue  # removed after it was listed, so there are newer checkpoints
        if skipped:
            _report_skipped(skipped, f"no older one in {store.location} is complete")
        return None
    raise CheckpointError(
        f"tpunb.load: the files in {store.location} are removed faster than they can be read",
        store.location,
    )


def _read(
    store: Store,
    stored: StoredCheckpoint,
    rank: int | None,
    weights_only: bool,
    skipped: list[str],
) -> Checkpoint | None:
    """Read a checkpoint if all its parts are whole, so that all ranks come to the same decision."""
    part = _part(store, stored, rank)
    with contextlib.ExitStack() as stack:
        files = {}
        for owner, name in stored.names.items():
            file = files[owner] = store.open(name)
            stack.callback(file.close)
            if not format.is_whole(file, crc_in(name)):
                skipped.append(f"step {stored.step} is cut off or changed ({store.path_of(name)})")
                return None
        part_file = files.pop(part)
        path = store.path_of(stored.names[part])
        try:
            state = format.read_state(part_file, weights_only)
            others = (format.read_state(files[each], weights_only) for each in sorted(files))
            return Checkpoint(sharded.unpack(state, others, path), stored.step, path)
        except pickle.UnpicklingError as error:
            names = ", ".join(format.unsafe_names(part_file)) or str(error)
            raise CheckpointError(
                f"tpunb.load: {path} holds more than data: rebuilding {names} can run code. If you "
                "trust its author: tpunb.load(weights_only=False). A file of state_dict()s, "
                "tensors, numbers and strings needs no trust",
                path,
            ) from error


def _part(store: Store, stored: StoredCheckpoint, rank: int | None) -> int:
    """Return the rank whose part this process loads."""
    if stored.ranks is None:
        return 0
    own, ranks = launched_rank_and_world()
    if rank is None and stored.sharded:
        return own if ranks == stored.ranks else 0
    if rank is None and ranks != stored.ranks:
        raise CheckpointError(
            f"tpunb.load: step {stored.step} in {store.location} has a part from each of "
            f"{stored.ranks} ranks, and this run has {ranks}: run it on {stored.ranks} cores, or "
            "choose a part: tpunb.load(rank=0)",
            store.location,
        )
    if rank is not None and not 0 <= rank < stored.ranks:
        raise CheckpointError(
            f"tpunb.load: step {stored.step} has parts of ranks 0 to {stored.ranks - 1}, "
            f"not {rank}",
            store.location,
        )
    return own if rank is None else rank


def _list(store: Store) -> list[StoredCheckpoint]:
    return group_files(store.list())


def _run_folder() -> str | None:
    run = os.environ.get(env_vars.RUN)
    return str(RunDir(run).checkpoints) if run else None


def _default() -> str:
    return os.environ.get(env_vars.CHECKPOINTS) or _run_folder() or "checkpoints"


def _store(path: str | Path) -> Store:
    try:
        return open_store(path)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}", str(path)) from error


def _step(step: object) -> int:
    if not isinstance(step, Integral):  # which no tensor is
        kind = type(step).__name__
        raise TypeError(
            f"the step of a checkpoint must be an int, not {kind}: tpunb.save(state, step)"
        )
    if step < 0:
        raise ValueError(f"the step of a checkpoint must not be negative: {step}")
    return int(step)


@dataclass
class _Process:
    """State of this process that its forks do not inherit."""

    saves: bool = False
    """True if it has called `save`."""
    parts: dict[str, int] = field(default_factory=dict)
    """The number of its last save in parts, by location."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)


_processes: dict[int, _Process] = {}


def _this_process() -> _Process:
    return _processes.setdefault(os.getpid(), _Process())


def _knows_its_attempt() -> bool:
    """False under torchrun on several hosts, where a later run may have the same variables."""
    env = os.environ
    return env_vars.RUN in env or env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE")


def _group() -> str:
    """Return a hash that all ranks of an attempt share and no other attempt has.

    Under torchrun the run's id is not enough: it is "none" by default. On one host the ranks'
    parent process identifies the attempt. Several hosts each have their own path of the run's
    folder, but share one store.
    """
    env = os.environ
    if env_vars.RUN in env:
        identity = [env[env_vars.RUN], env.get(env_vars.ATTEMPT, "0")]
        if env_vars.ADDRESS in env:
            identity[0] = Path(identity[0]).name
            identity += [env["MASTER_ADDR"], env["MASTER_PORT"]]
    elif "TORCHELASTIC_RUN_ID" in env and "RANK" in env:
        identity = [env["TORCHELASTIC_RUN_ID"], env.get("TORCHELASTIC_RESTART_COUNT", "0")]
        if env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE"):
            parent = Path(f"/proc/{os.getppid()}/stat").read_text()
            started = parent.rpartition(")")[2].split()[19]
            identity += [str(os.getppid()), started]
    else:
        identity = [_this_process().token]
    return hashlib.sha256("\0".join(identity).encode()).hexdigest()[:8]


def _write_failure(error: Exception, step: int, store: Store, state_bytes: int) -> str:
    reason, elsewhere = _reason(error), ""
    if isinstance(error, OSError):
        elsewhere = ". To save elsewhere: tpunb.save(…, path=…) or the variable TPUNB_CHECKPOINTS"
        if error.errno in _DISK_FULL:
            takes = f"its tensors take {size(state_bytes)}"
            free = ", ".join(filter(None, [takes, store.describe_free()]))
            reason += f" ({free}; {KEEP} checkpoints and the one being written must fit)"
    return (
        f"tpunb.save: cannot write to {store.location}: {reason}. Step {step} is not saved; "
        f"earlier checkpoints are intact{elsewhere}"
    )


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"


def _report_skipped(skipped: Sequence[str], then: str) -> None:
    """Report the newest of the checkpoints that were skipped: a rank may have saved for hours."""
    more = f"; and {len(skipped) - SHOWN} more" if len(skipped) > SHOWN else ""
    _report("load", f"{'; '.join(skipped[:SHOWN])}{more}: {then}")


def _report(call: str, message: str) -> None:
    # On a full disk, or with a closed stderr, the checkpoint matters more than this line.
    with contextlib.suppress(OSError, ValueError):
        print(f"tpunb.{call}: {message}", file=sys.stderr, flush=True)
