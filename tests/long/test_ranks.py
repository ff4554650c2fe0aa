"""More of tests/backends/xla and tests/worker, which takes longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.drivers.kernel import ROOT
from tests.drivers.preludes import FORKED, REFUSED
from tests.drivers.ranks import Ranks
from tests.worker.test_fork_safety import OFTEN, check_fork, check_refusal
from tests.worker.test_rich_progress import run
from tests.worker.test_stepped import EQUAL_BUT_SLOW, blamed

# One process imports torch_xla, and each case is a fork of it, as ranks are.
CODE = """\
import os, sys
import torch, torch_xla
from tpunb.backends.xla import xla_device

def case(cache, own=""):
    if os.fork():
        os.wait()
        return
    os.environ["TPUNB_XLA_CACHE"] = cache
    if own:
        import torch_xla.runtime as xr
        xr.initialize_cache(own)
    xla_device.keep_compiled(3, 8)
    x = torch.ones(3, device="xla")
    torch_xla.sync()
    print((x + 1).cpu().tolist(), os.environ.get("XLA_PERSISTENT_CACHE_PATH"), flush=True)
    os._exit(0)

place = sys.argv[1]
case(place + "/cache")
case(place + "/unused", own=place + "/own")
case("off")
case(place + "/file")
print(torch_xla.__version__)
"""


@pytest.mark.usefixtures("starts_processes")
def test_what_is_compiled_is_kept_where_the_environment_says(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    env = {**os.environ, "PJRT_DEVICE": "CPU"}
    for name in ("TPUNB_XLA_CACHE", "XLA_PERSISTENT_CACHE_PATH"):
        env.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", CODE, tmp_path], env=env, capture_output=True, text=True, check=True
    )
    kept, own, off, impossible, version = done.stdout.splitlines()
    place = tmp_path / "cache" / version / "3-of-8"
    assert kept == f"[2.0, 2.0, 2.0] {place}"
    assert list(place.iterdir())  # torch_xla has written there
    assert own == f"[2.0, 2.0, 2.0] {tmp_path / 'own'}"
    assert not (tmp_path / "unused").exists()
    assert off == impossible == "[2.0, 2.0, 2.0] None"
    assert f"tpunb: compiled programs are not kept: {tmp_path / 'file'}/" in done.stderr


LATER = """
    from tpunb.backends import launchers

    before = list(sys.meta_path)
    assert not {"torch", "torch_xla", "accelerate"} & set(sys.modules)
    calls = []
    with launchers.calling_here(0):
        assert "torch" not in sys.modules
        import torch_xla
        import torch_xla.distributed.xla_multiprocessing as xmp
        from torch_xla._internal import pjrt
        import accelerate
        from accelerate import notebook_launcher

        torch_xla.launch(lambda *args: calls.append(args), args=(1,))
        xmp.spawn(lambda *args: calls.append(args), args=(2,), nprocs=8)
        notebook_launcher(lambda *args: calls.append(args), (3,), num_processes=8)
        with launchers.calling_here(5):
            torch_xla.launch(lambda *args: calls.append(args))
            notebook_launcher(lambda *args: calls.append(args))
        torch_xla.launch(lambda *args: calls.append(args))
        inside = pjrt.spawn, pjrt.run_multiprocess, notebook_launcher.__code__
    assert calls == [(0, 1), (0, 2), (3,), (5,), (), (0,)], calls
    # A library may have added its own (six does).
    assert not [each for each in sys.meta_path if type(each).__module__.startswith("tpunb")]
    assert [each for each in sys.meta_path if each in before] == before
    # Everything is restored: torch_xla's and accelerate's own errors are raised again.
    assert pjrt.spawn.__module__ == pjrt.run_multiprocess.__module__ == "torch_xla._internal.pjrt"
    assert notebook_launcher.__code__.co_filename.endswith("accelerate/launchers.py")
    import torch.distributed as dist
    assert sys.modules["torch_xla.torch_xla"].dist is dist
    for call, said in (
        (lambda: xmp.spawn(print, nprocs=8), "Unsupported nprocs (8)"),
        (lambda: notebook_launcher(print), "You have to specify the number of devices"),
    ):
        try:
            call()
        except ValueError as error:
            assert said in str(error), error
        else:
            raise AssertionError(said)
    with launchers.calling_here(7):
        torch_xla.launch(lambda *args: calls.append(args))
    assert calls[-1] == (7,)
"""


@pytest.mark.usefixtures("starts_processes")
def test_in_a_kernel_libraries_may_be_imported_later_and_are_restored(tmp_path: Path) -> None:
    program = tmp_path / "kernel.py"
    program.write_text("import sys\n" + textwrap.dedent(LATER))
    env = {**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, program], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "nprocs=8 is ignored: 1 rank runs",
        "num_processes=8 is ignored: 1 rank runs",
    ]


def test_no_difference_of_equal_models_of_more_kinds(ranks: Ranks, tmp_path: Path) -> None:
    assert blamed(ranks, EQUAL_BUT_SLOW, tmp_path) == []


@pytest.mark.parametrize("library", [name for name in FORKED if name not in OFTEN])
def test_fork_after_a_library_that_survives_it(ranks: Ranks, library: str) -> None:
    check_fork(ranks, library)


@pytest.mark.parametrize("library", [name for name in REFUSED if name not in OFTEN])
def test_fork_refused_after_a_library(ranks: Ranks, library: str) -> None:
    check_refusal(ranks, library)


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.timeout(3600)
def test_many_forks_between_mixed_work() -> None:  # `make bench` makes a thousand
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "tests.drivers.forks", "40"]
    env = {**os.environ, "PJRT_DEVICE": "CPU"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert (told["ends"], told["refused"]) == ({"exit 0": 40}, {}), done.stderr


@pytest.mark.usefixtures("starts_processes")
def test_rich_progress_bar_of_lightning(tmp_path: Path) -> None:
    code = """
import torch, lightning
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
seen = []
class Look(Callback):
    def on_train_batch_end(self, *args):
        seen.append(told())
lightning.Trainer(
    max_epochs=2, limit_train_batches=4, limit_val_batches=0, logger=False, accelerator="cpu",
    enable_checkpointing=False, enable_model_summary=False, default_root_dir=str(file.parent),
    callbacks=[RichProgressBar(refresh_rate=1), Look()],
).fit(BoringModel())
print()
print(json.dumps(seen))
"""
    seen = run(tmp_path, code, "0")
    [last] = seen[-1]
    assert last["name"].startswith("Epoch 1")
    assert last["total"] == 4
    assert last["done"] >= 3
