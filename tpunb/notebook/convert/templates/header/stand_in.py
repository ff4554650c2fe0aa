"""`tpunb.log`, `track`, `save` and `load` for exported scripts on machines without tpunb.

Never imported: `export.py` copies the functions that a script uses into its header. Checkpoints
have tpunb's format (`training/checkpoint/format.py`), so each can continue from the other's.
"""

import atexit as _atexit
import hashlib as _hashlib
import io as _io
import os as _os
import pickle as _pickle
import re as _re
import sys as _sys
import types as _types
import zlib as _zlib
from collections.abc import Iterable as _Iterable
from collections.abc import Iterator as _Iterator
from typing import Any as _Any

_WAITING: "list[_Any]" = []


def _tpunb_log(step: "int | None" = None, *, reduce: _Any = "mean", **values: _Any) -> None:
    """Print metrics in rank 0. Values of XLA tensors are read after their step has started."""

    def write(values: "dict[str, _Any]") -> None:
        numbers = [f"{name} {float(value):.6g}" for name, value in values.items()]
        if _os.environ.get("RANK", "0") == "0":
            print(" · ".join([f"step {step}"] * (step is not None) + numbers), flush=True)

    held = {
        name: value.detach().clone() if hasattr(value, "detach") else value
        for name, value in values.items()
    }
    if any(getattr(getattr(value, "device", None), "type", "") == "xla" for value in held.values()):
        # In every rank, so that all ranks compute the same graph.
        if not _WAITING:
            _atexit.register(lambda: _sys.modules["torch_xla"].sync())
        _WAITING[:] = [step]
        _sys.modules["torch_xla.core.xla_model"].add_step_closure(write, args=(held,))
    else:
        write(held)


def _tpunb_track(
    iterable: "_Iterable[_Any]", total: "int | None" = None, *, name: str = ""
) -> "_Iterator[_Any]":
    """Iterate without the progress display of tpunb's own `track`."""
    return iter(iterable)


_CHECKPOINT = _re.compile(r"(\d{6,})-step-(\d+)-([0-9a-f]{8})(?:\.(\d+)-rank-(\d+)-of-(\d+))?\.pt")
_SAVED: "dict[str, int]" = {}


def _tpunb_start() -> str:
    """Return eight hexadecimal digits that all ranks of this start share."""
    env = _os.environ
    parts = [env.get("TORCHELASTIC_RUN_ID", ""), env.get("TORCHELASTIC_RESTART_COUNT", "")]
    parts += [env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")]
    if env.get("LOCAL_WORLD_SIZE", "1") == env.get("WORLD_SIZE", "1"):
        parts.append(str(_os.getppid() if "RANK" in env else _os.getpid()))
    return _hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _tpunb_folder(path: _Any) -> str:
    folder = str(path or _os.environ.get("TPUNB_CHECKPOINTS") or "checkpoints")
    if "://" in folder:
        raise ValueError(f"{folder}: checkpoints at a URL need tpunb: pip install tpunb")
    return folder


def _tpunb_checkpoints(folder: str) -> "list[dict[int, _re.Match[str]]]":
    """Return the files, by rank, of each checkpoint in a folder, the newest first.

    The order is that of rank 0's files: other ranks number their files at other times.
    """
    names = sorted(_os.listdir(folder)) if _os.path.isdir(folder) else []
    found: dict[tuple[_Any, ...], dict[int, _re.Match[str]]] = {}
    for match in filter(None, map(_CHECKPOINT.fullmatch, names)):
        key = match.group(2, 3, 4, 6) if match[4] else match.group(2, 3, 1)
        found.setdefault(key, {})[int(match[5] or 0)] = match
    return sorted(found.values(), key=_tpunb_number, reverse=True)


def _tpunb_number(files: "dict[int, _re.Match[str]]") -> int:
    return int(files[0][1]) if 0 in files else max(int(match[1]) for match in files.values())


def _tpunb_whole(files: "dict[int, _re.Match[str]]") -> bool:
    return len(files) == int(next(iter(files.values()))[6] or 1)


def _tpunb_save(state: _Any, step: int, *, per_rank: bool = False, path: _Any = None) -> None:
    """Write a checkpoint in rank 0 or in every rank; the last three are kept."""
    import torch

    class ToCpu(_pickle.Pickler):
        def reducer_override(self, value: _Any) -> _Any:
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                return value.detach().cpu().__reduce_ex__(_pickle.DEFAULT_PROTOCOL)
            return NotImplemented

    if torch_xla := _sys.modules.get("torch_xla"):
        torch_xla.sync()  # in every rank: the step may hold a collective
    rank, ranks = int(_os.environ.get("RANK", "0")), _os.environ.get("WORLD_SIZE", "1")
    folder = _tpunb_folder(path)
    count = _SAVED[folder] = _SAVED.get(folder, -1) + 1
    if rank and not per_rank:
        return
    _os.makedirs(folder, exist_ok=True)
    every = [match for files in _tpunb_checkpoints(folder) for match in files.values()]
    number = max((int(match[1]) for match in every), default=0) + 1
    part = f".{count}-rank-{rank}-of-{ranks}" if per_rank else ""
    name = f"{number:06d}-step-{step}-{_tpunb_start()}{part}.pt"
    module = _types.ModuleType("pickle")
    module.__dict__.update(vars(_pickle), Pickler=ToCpu)
    with _io.BytesIO() as buffer:
        torch.save(state, buffer, pickle_module=module)
        data = buffer.getvalue()
    # The archive's comment: a name and a checksum, with which tpunb verifies that it is complete.
    data = data[:-2] + (256).to_bytes(2, "little")
    data += f"tpunb checkpoint 1 {name} crc32 ".encode().rjust(248)
    data += f"{_zlib.crc32(data):08x}".encode()
    partial = _os.path.join(folder, f".{name}.{_os.getpid()}")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        _os.fsync(file.fileno())
    _os.replace(partial, _os.path.join(folder, name))
    whole = list(filter(_tpunb_whole, _tpunb_checkpoints(folder)))
    for match in [match for files in whole[3:] for match in files.values()]:
        try:
            _os.unlink(_os.path.join(folder, match[0]))
        except FileNotFoundError:  # another rank was quicker
            continue


class _TpunbCheckpoint(_types.SimpleNamespace):
    """Return value of `load`: state, step and path."""

    def __getitem__(self, key: _Any) -> _Any:
        return self.state[key]

    def __iter__(self) -> "_Iterator[_Any]":
        return iter((self.state, self.step))


def _tpunb_load(
    path: _Any = None,
    *,
    step: "int | None" = None,
    rank: "int | None" = None,
    weights_only: bool = True,
) -> "_TpunbCheckpoint | None":
    """Return the newest complete checkpoint or None; one of this start only after a save."""
    import torch

    folder = _tpunb_folder(path)
    own = int(_os.environ.get("RANK", "0")) if rank is None else rank
    for files in filter(_tpunb_whole, _tpunb_checkpoints(folder)):
        match = files.get(own if len(files) > 1 else 0)
        if match is None or (step is not None and int(match[2]) != step):
            continue
        if step is None and folder not in _SAVED and match[3] == _tpunb_start():
            continue
        file = _os.path.join(folder, match[0])
        state = torch.load(file, map_location="cpu", weights_only=weights_only)
        return _TpunbCheckpoint(state=state, step=int(match[2]), path=file)
    if step is not None:
        raise ValueError(f"tpunb.load: no whole checkpoint of step {step} in {folder}")
    return None
