"""More of tests/notebook/convert/test_export.py, which takes longer."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.notebook.convert.test_export import Ranks, exported, ranks
from tpunb.notebook.convert.header import functions


def test_a_package_is_installed_for_this_interpreter_and_found(
    ranks: Ranks, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    with zipfile.ZipFile(ranks.work / "tiny-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "x = 5")
        wheel.writestr(
            "tiny-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n"
        )
        wheel.writestr(
            "tiny-1.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("tiny-1.dist-info/RECORD", "")
    import ensurepip

    (pip,) = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
    script = exported(
        "!pip install --quiet --no-index tiny-1-*.whl", "import tiny\nprint(tiny.__file__)"
    )
    ended = ranks.run(script, 2, str(tmp_path / "venv/bin/python"), PYTHONPATH=str(pip))
    assert [done.returncode for done in ended] == [0, 0], ended
    assert all(str(tmp_path / "venv") in done.stdout for done in ended)


ON_A_TPU = """
import os, torch.distributed as dist, torch_xla
os.environ.update(PJRT_DEVICE="TPU", RANK="6", WORLD_SIZE="8")
# This machine has none: what torch would do on one is only recorded.
dist.init_process_group = lambda *args, **kwargs: print("joined", args, kwargs)
dist.destroy_process_group = lambda: print("left")
_tpunb_join_ranks()
import torch_xla.distributed.xla_multiprocessing as xmp
torch_xla.launch(lambda *args: print(args), args=("a",))
xmp.spawn(lambda *args: print(args), args=("b",), nprocs=8, start_method="fork")
"""


def test_without_tpunb_a_rank_joins_the_others_on_a_tpu_and_launchers_call_here(
    starts_processes: None,
) -> None:
    code = f"{functions(ON_A_TPU)}\n{ON_A_TPU}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "joined ('xla',) {'init_method': 'xla://'}",
        "left",
        "(6, 'a')",
        "(6, 'b')",
    ], done.stderr
