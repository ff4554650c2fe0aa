"""More of tests/xla/test_launchers.py, which takes longer."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

LATER = """
    from tpunb.xla import launchers

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
