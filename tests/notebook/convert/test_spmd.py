"""What reading the cells shows of SPMD: only what surely runs."""

from __future__ import annotations

import pytest

from tests.notebook.convert.notebooks import notebook
from tpunb.notebook.convert.convert import convert

XR = "import torch_xla.runtime as xr\n"
XS = "import torch_xla.distributed.spmd as xs\n"
FSDP = "from torch_xla.experimental.spmd_fully_sharded_data_parallel import "
CALLS = "cell [1] calls use_spmd()"
SETS = "cell [1] sets XLA_USE_SPMD"
MARKS = "cell [1] uses mark_sharding(), which works in that mode only"
WRAPS = "cell [1] uses FSDPv2, which works in that mode only"

TENSOR = "from torch.distributed.tensor import distribute_tensor, init_device_mesh, Shard\n"
SHARDS = "cell [1] calls distribute_tensor() for a mesh of 'xla'"

PRELUDES = {
    XR + "xr.use_spmd()": CALLS,
    "import torch_xla\ntorch_xla.runtime.use_spmd()": CALLS,
    XR + "try:\n    xr.use_spmd()\nexcept RuntimeError: ...": CALLS,
    XR + "if __name__ == '__main__':\n    xr.use_spmd()": CALLS,
    XR + "def a():\n    b()\ndef b():\n    xr.use_spmd()\na()": CALLS,
    "def a():\n    import torch_xla.runtime as xr\n    xr.use_spmd()\na()": CALLS,
    XR + "class T:\n    def fit(self):\n        xr.use_spmd()\nT().fit()": CALLS,
    XR + "def f(i):\n    if i:\n        raise ValueError\n    xr.use_spmd()\nf(0)": CALLS,
    XR + XS + "xs.mark_sharding(x, mesh, (0,))\nxr.use_spmd()": CALLS,
    XR + "%time xr.use_spmd()": CALLS,
    "from optimum.tpu import fsdp_v2\nfsdp_v2.use_fsdp_v2()": "cell [1] calls use_fsdp_v2()",
    "import os\nos.environ['XLA_USE_SPMD'] = '1'": SETS,
    "import os\nos.environ.update(XLA_USE_SPMD='1')": SETS,
    XS + "xs.mark_sharding(x, mesh, (0, None))": MARKS,
    "from torch_xla.experimental.xla_sharding import mark_sharding\nmark_sharding(x, m, s)": MARKS,
    FSDP + "SpmdFullyShardedDataParallel as FSDPv2\nmodel = FSDPv2(model, mesh=mesh)": WRAPS,
    TENSOR + "mesh = init_device_mesh('xla', (4,))\ndistribute_tensor(x, mesh, [Shard(0)])": SHARDS,
    TENSOR + "mesh = init_device_mesh('cpu', (4,))\ndistribute_tensor(x, mesh, [Shard(0)])": None,
    TENSOR + "mesh = init_device_mesh('xla', (4,))": None,
    XR + "if spmd:\n    xr.use_spmd()": None,
    XR + "def f(i):\n    if i:\n        return\n    xr.use_spmd()\nf(0)": None,
    XR + "class T:\n    def fit(self):\n        xr.use_spmd()\nt = T()": None,
    XR + "print(xr.is_spmd())": None,
    "def use_spmd(): ...\nuse_spmd()": None,
    "import os\nos.environ['XLA_USE_SPMD'] = '0'": None,
    "exec('xr.use_spmd()')": None,
    "# tpu: skip\n" + XR + "xr.use_spmd()": None,
    "%%tpu_debug\n" + XR + "xr.use_spmd()": None,
    XS + "mesh = xs.Mesh([0], (1,))": None,
    FSDP + "SpmdFullyShardedDataParallel as FSDPv2": None,
    "x = 'use_spmd'": None,
}


@pytest.mark.parametrize(("source", "reason"), PRELUDES.items(), ids=PRELUDES)
def test_a_prelude(source: str, reason: str | None) -> None:
    assert convert(notebook(source, "%%tpu_train\nmain()")).spmd == reason


@pytest.mark.parametrize(
    "train",
    [
        "torch_xla.launch(f)",
        "xmp.spawn(f, args=())",
        "notebook_launcher(f, num_processes=1)",
        "f(0)",
        "xr.use_spmd()",
    ],
)
def test_a_train_cell(train: str) -> None:
    prelude = (
        f"{XR}import torch_xla\nimport torch_xla.distributed.xla_multiprocessing as xmp\n"
        "from accelerate import notebook_launcher\ndef f(i):\n    xr.use_spmd()"
    )
    # A function is named with the cell that calls it.
    made = convert(notebook(prelude, f"%%tpu_train\n{train}"))
    assert made.spmd == "cell [2] calls use_spmd()"


def test_the_header_says_how_to_run_the_script() -> None:
    plain = convert(notebook("x = 1", "%%tpu_train\nmain()")).text
    spmd = convert(notebook(f"{XR}xr.use_spmd()", "%%tpu_train\nmain()")).text
    assert "torchrun --nproc-per-node=4 script.py     on four\n" in plain
    assert "_tpunb_standalone.prepare()\n" in plain
    assert "CPU_NUM_DEVICES=4 python script.py" in spmd
    assert "# Not `torchrun --nproc-per-node=4`" in spmd
    assert "_tpunb_standalone.prepare(spmd=True)\n" in spmd
    assert max(map(len, spmd.split("\n"))) <= 100
