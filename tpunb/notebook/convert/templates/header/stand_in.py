"""`tpunb.log`, `track`, `save` and `load` for exported scripts on machines without tpunb.

Never imported: `export.py` copies the functions that a script uses into its header. Checkpoints
have tpunb's format (`training/checkpoint/store.py`), so each can continue from the other's.
"""

import atexit as _tpunb_atexit
import hashlib as _tpunb_hashlib
import io as _tpunb_io
import os as _tpunb_os
import pickle as _tpunb_pickle
import re as _tpunb_re
import sys as _tpunb_sys
import types as _tpunb_types
import zlib as _tpunb_zlib
from collections.abc import Iterable as _TpunbIterable
from collections.abc import Iterator as _TpunbIterator
from typing import Any as _TpunbAny

_TPUNB_WAITING: "list[_TpunbAny]" = []


def _tpunb_log(
    step: "int | None" = None, *, reduce: _TpunbAny = "mean", **values: _TpunbAny
) -> None:
    """Print metrics in rank 0. Values of XLA tensors are read after their step has started."""

    def write(values: "dict[str, _TpunbAny]") -> None:
        numbers = [f"{name} {float(value):.6g}" for name, value in values.items()]
        if _tpunb_os.environ.get("RANK", "0") == "0":
            print(" · ".join([f"step {step}"] * (step is not None) + numbers), flush=True)

    held = {
        name: value.detach().clone() if hasattr(value, "detach") else value
        for name, value in values.items()
    }
    if any(getattr(getattr(value, "device", None), "type", "") == "xla" for value in held.values()):
        # In every rank, so that all ranks compute the same graph.
        if not _TPUNB_WAITING:
            _tpunb_atexit.register(lambda: _tpunb_sys.modules["torch_xla"].sync())
        _TPUNB_WAITING[:] = [step]
        _tpunb_sys.modules["torch_xla.core.xla_model"].add_step_closure(write, args=(held,))
    else:
        write(held)


def _tpunb_track(
    iterable: "_TpunbIterable[_TpunbAny]", total: "int | None" = None, *, name: str = ""
) -> "_TpunbIterator[_TpunbAny]":
    """Iterate without the progress display of tpunb's own `track`."""
    return iter(iterable)


_TPUNB_CHECKPOINT = _tpunb_re.compile(
    r"(\d{6,})-step-(\d+)-([0-9a-f]{8})(?:\.(\d+)-rank-(\d+)-of-(\d+))?(?:-[0-9a-f]{8})?\.pt"
)
_TPUNB_SAVED: "dict[str, int]" = {}


def _tpunb_start() -> str:
    """Return eight hexadecimal digits that all ranks of this start share."""
    env = _tpunb_os.environ
    parts = [env.get("TORCHELASTIC_RUN_ID", ""), env.get("TORCHELASTIC_RESTART_COUNT", "")]
    parts += [env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")]
    if env.get("LOCAL_WORLD_SIZE", "1") == env.get("WORLD_SIZE", "1"):
        parts.append(str(_tpunb_os.getppid() if "RANK" in env else _tpunb_os.getpid()))
    return _tpunb_hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _tpunb_folder(path: _TpunbAny) -> str:
    folder = str(path or _tpunb_os.environ.get("TPUNB_CHECKPOINTS") or "checkpoints")
    if "://" in folder:
        raise ValueError(f"{folder}: checkpoints at a URL need tpunb: pip install tpunb")
    return folder


def _tpunb_checkpoints(folder: str) -> "list[dict[int, _tpunb_re.Match[str]]]":
    """Return the files, by rank, of each checkpoint in a folder, the newest first.

    The order is that of rank 0's files: other ranks number their files at other times.
    """
    names = sorted(_tpunb_os.listdir(folder)) if _tpunb_os.path.isdir(folder) else []
    found: dict[tuple[_TpunbAny, ...], dict[int, _tpunb_re.Match[str]]] = {}
    for match in filter(None, map(_TPUNB_CHECKPOINT.fullmatch, names)):
        key = match.group(2, 3, 4, 6) if match[4] else match.group(2, 3, 1)
        found.setdefault(key, {})[int(match[5] or 0)] = match
    return sorted(found.values(), key=_tpunb_number, reverse=True)


def _tpunb_number(files: "dict[int, _tpunb_re.Match[str]]") -> int:
    return int(files[0][1]) if 0 in files else max(int(match[1]) for match in files.values())


def _tpunb_whole(files: "dict[int, _tpunb_re.Match[str]]") -> bool:
    return len(files) == int(next(iter(files.values()))[6] or 1)


def _tpunb_save(
    state: _TpunbAny, step: int, *, per_rank: bool = False, path: _TpunbAny = None
) -> None:
    """Write a checkpoint in rank 0 or in every rank; the last three are kept."""
    import torch

    class CpuPickler(_tpunb_pickle.Pickler):
        def reducer_override(self, value: _TpunbAny) -> _TpunbAny:
            if hasattr(value, "device_mesh"):
                raise TypeError("to save a DTensor, this script needs tpunb: pip install tpunb")
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                return value.detach().cpu().__reduce_ex__(_tpunb_pickle.DEFAULT_PROTOCOL)
            return NotImplemented

    if torch_xla := _tpunb_sys.modules.get("torch_xla"):
        torch_xla.sync()  # in every rank: the step may hold a collective
    rank, ranks = int(_tpunb_os.environ.get("RANK", "0")), _tpunb_os.environ.get("WORLD_SIZE", "1")
    folder = _tpunb_folder(path)
    count = _TPUNB_SAVED[folder] = _TPUNB_SAVED.get(folder, -1) + 1
    if rank and not per_rank:
        return
    _tpunb_os.makedirs(folder, exist_ok=True)
    every = [match for files in _tpunb_checkpoints(folder) for match in files.values()]
    number = max((int(match[1]) for match in every), default=0) + 1
    part = f".{count}-rank-{rank}-of-{ranks}" if per_rank else ""
    module = _tpunb_types.ModuleType("pickle")
    module.__dict__.update(vars(_tpunb_pickle), Pickler=CpuPickler)
    with _tpunb_io.BytesIO() as buffer:
        torch.save(state, buffer, pickle_module=module)
        data = buffer.getvalue()
    # With the checksum in the name, tpunb verifies that the file is complete.
    crc = f"{_tpunb_zlib.crc32(data):08x}"
    name = f"{number:06d}-step-{step}-{_tpunb_start()}{part}-{crc}.pt"
    partial = _tpunb_os.path.join(folder, f".{name}.{_tpunb_os.getpid()}")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        _tpunb_os.fsync(file.fileno())
    _tpunb_os.replace(partial, _tpunb_os.path.join(folder, name))
    whole = list(filter(_tpunb_whole, _tpunb_checkpoints(folder)))
    for match in [match for files in whole[3:] for match in files.values()]:
        try:
            _tpunb_os.unlink(_tpunb_os.path.join(folder, match[0]))
        except FileNotFoundError:  # another rank was quicker
            continue


class _TpunbCheckpoint(_tpunb_types.SimpleNamespace):
    """Return value of `load`: state, step and path."""

    def __getitem__(self, key: _TpunbAny) -> _TpunbAny:
        return self.state[key]

    def __iter__(self) -> "_TpunbIterator[_TpunbAny]":
        return iter((self.state, self.step))


def _tpunb_load(
    path: _TpunbAny = None,
    *,
    step: "int | None" = None,
    rank: "int | None" = None,
    weights_only: bool = True,
) -> "_TpunbCheckpoint | None":
    """Return the newest complete checkpoint or None; one of this start only after a save."""
    import torch

    folder = _tpunb_folder(path)
    own = int(_tpunb_os.environ.get("RANK", "0")) if rank is None else rank
    for files in filter(_tpunb_whole, _tpunb_checkpoints(folder)):
        match = files.get(own if len(files) > 1 else 0)
        if match is None or (step is not None and int(match[2]) != step):
            continue
        if step is None and folder not in _TPUNB_SAVED and match[3] == _tpunb_start():
            continue
        file = _tpunb_os.path.join(folder, match[0])
        state = torch.load(file, map_location="cpu", weights_only=weights_only)
        return _TpunbCheckpoint(state=state, step=int(match[2]), path=file)
    if step is not None:
        raise ValueError(f"tpunb.load: no complete checkpoint of step {step} in {folder}")
    return None
