"""Launchers of torch_xla and accelerate call their function in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drivers.ranks import Ranks, rehearse


def launched() -> list[object]:
    rank, world = rehearse()
    # As a prelude does, before the rank redirects launchers.
    import torch_xla
    import torch_xla.distributed.xla_multiprocessing as xmp
    from torch_xla import launch
    from torch_xla._internal import pjrt
    from torch_xla.distributed.xla_multiprocessing import spawn

    from tpunb.backends import launchers

    launchers.redirect_launchers(rank)
    calls: list[object] = []

    def fn(index: int, *args: object) -> str:
        calls.append((index, os.getpid(), args))
        return "not passed on"

    assert launch(fn, args=(1, "a")) is None
    assert torch_xla.launch(fn, args=(2,), start_method="fork") is None
    assert torch_xla.launch(fn, debug_single_process=False) is None
    assert xmp.spawn(fn, args=(3,), nprocs=world, start_method="fork") is None
    assert spawn(fn, (4,), None, False, True, "spawn") is None
    for _ in range(2):
        assert xmp.spawn(fn, args=(5,), nprocs=8, join=True, daemon=False) is None
    assert pjrt.run_multiprocess(fn, 6, start_method="fork") == {rank: "not passed on"}
    pid = os.getpid()
    expected = [(1, "a"), (2,), (), (3,), (4,), (5,), (5,)]
    assert calls == [*((rank, pid, args) for args in expected), (6, pid, ())]
    with pytest.raises(ZeroDivisionError):
        torch_xla.launch(lambda index: 1 // 0)
    # Nothing else sees another torch.distributed.
    import torch.distributed as dist

    assert dist.is_torchelastic_launched()
    return calls


def test_in_a_rank_the_function_gets_its_index_once(ranks: Ranks) -> None:
    ended = ranks.run(launched, 2)
    assert [end.error for end in ended] == ["", ""]
    assert [end.output for end in ended] == ["nprocs=8 is ignored: 2 ranks run\n", ""]


def spawned() -> list[object]:
    rank, world = rehearse()
    # As a prelude does, before the rank redirects launchers.
    import torch.multiprocessing as mp
    from torch.multiprocessing import spawn

    from tpunb.backends import launchers

    launchers.redirect_launchers(rank)
    calls: list[object] = []

    def fn(index: int, *args: object) -> None:
        calls.append((index, os.getpid(), args))

    assert mp.spawn(fn, args=(1,), nprocs=world, join=True) is None
    context = spawn(fn, (2,), world, join=False)
    assert context is not None
    assert context.join()
    with pytest.raises(ValueError, match=r"spawn\(nprocs=8\) in a run with 2 ranks: .*--cores 8"):
        mp.spawn(fn, nprocs=8)
    assert calls == [(rank, os.getpid(), (1,)), (rank, os.getpid(), (2,))]
    return calls


def test_torch_s_spawn_calls_its_function_in_the_rank(ranks: Ranks) -> None:
    assert [end.error for end in ranks.run(spawned, 2)] == ["", ""]


def accelerated() -> list[object]:
    rank, _ = rehearse()
    # As a prelude does: accelerate is imported before the rank redirects launchers.
    from accelerate import notebook_launcher

    from tpunb.backends import launchers

    launchers.redirect_launchers(rank)
    import accelerate
    from accelerate.launchers import notebook_launcher as other

    calls: list[object] = []
    for launcher in (notebook_launcher, other, accelerate.notebook_launcher):
        assert launcher(lambda *args: calls.append(args), (1, 2), 8, mixed_precision="bf16") is None
    assert notebook_launcher(function=calls.append, args=["x"], use_port="29501") is None
    return calls


def test_notebook_launcher_imported_before(ranks: Ranks) -> None:
    ended = ranks.run(accelerated, 2)
    assert [end.error for end in ended] == ["", ""]
    assert ended[0].value == [(1, 2), (1, 2), (1, 2), "x"]
    assert ended[0].output == "num_processes=8 is ignored: 2 ranks run\n"


COMMANDS = (
    "torchrun t.py",
    "CUDA_VISIBLE_DEVICES=0,1 /a/bin/accelerate launch t.py",
    "cd x; time torchrun t.py 2>&1 | tee log",
    "python3 -u -m torch.distributed.launch t.py",
    "echo a\nnohup timeout 60 (deepspeed x) &",
    ["bash", "-c", "cd x && torchrun t.py"],
    [sys.executable, b"-m", "torch.distributed.run", "t.py"],
    [sys.executable, Path("/a/bin/torchrun"), "t.py"],
)
OTHERS = (
    "git commit -m 'a; torchrun b'",
    "which torchrun; pip show deepspeed; accelerate config",
    "python train.py # torchrun\n# torchrun x\necho 'unbalanced",
    ["git", "commit", "-m", "torchrun"],
    Path("/bin/ls"),
    "",
)


def test_commands_that_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpunb.backends import launchers
    from tpunb.utils.errors import LaunchError

    monkeypatch.setenv("WORLD_SIZE", "2")
    with launchers.calling_here(0):
        for command in COMMANDS:
            with pytest.raises(LaunchError, match="from each of the 2 ranks"):
                subprocess.Popen(command, shell=isinstance(command, str))
        for command in OTHERS:
            launchers._refuse_command(command, isinstance(command, str))


def test_a_failed_block_restores_as_well() -> None:
    from tpunb.backends import launchers

    before = list(sys.meta_path)

    def failing() -> None:
        with launchers.calling_here(0):
            assert sys.meta_path != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert sys.meta_path == before
