"""Converted scripts that run by themselves: `python script.py` and `torchrun … script.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tpunb.utils.install_commands import INSTALL_XLA

pytestmark = [
    pytest.mark.usefixtures("starts_processes")
]  # each imports torch_xla in new processes

SCRIPT = """
    from tpunb.worker import standalone

    standalone.prepare()

    import json
    import os
    import sys

    import tpunb
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr
    from torch import nn

    torch.manual_seed(0)
    features, labels = torch.randn(32, 6), torch.randint(0, 3, (32,))

    def train(index, folder):
        world = xr.world_size()
        assert index == xr.global_ordinal() == int(os.environ.get("RANK", "0"))
        device = torch_xla.device()
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
        xm.broadcast_master_param(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for step in range(12):
            first = step % 4 * 8 + index * 8 // world
            mine = slice(first, first + 8 // world)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features[mine].to(device)), labels[mine].to(device))
            loss.backward()
            xm.optimizer_step(optimizer)
            mean = xm.all_reduce(xm.REDUCE_SUM, loss.detach(), scale=1 / world)
            if step % 6 == 0:
                tpunb.log(step, loss=mean)
            torch_xla.sync()
            losses.append(mean.item())
        found = {"losses": losses, "weights": [p.flatten().tolist() for p in model.parameters()],
                 "world": world, "device": os.environ["PJRT_DEVICE"]}
        open(f"{folder}/{index}.json", "w").write(json.dumps(found))

    torch_xla.launch(train, args=(sys.argv[1],))
"""  # noqa: E501
TORCHRUN = ("-m", "torch.distributed.run")


def run(tmp_path: Path, command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("PJRT_DEVICE", "TPUNB_RUN")}
    return subprocess.run(
        [sys.executable, *command],
        env={**inherited, "PYTHONPATH": os.getcwd(), **env},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )


def trained(tmp_path: Path, *command: str) -> tuple[list[dict[str, Any]], str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = run(tmp_path, [*command, str(script), str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert "PJRT_DEVICE" not in done.stderr  # torch_xla's warning about its own choice
    found = sorted(tmp_path.glob("*.json"))
    assert [path.stem for path in found] == [str(rank) for rank in range(len(found))]
    return [json.loads(path.read_text()) for path in found], done.stdout


@pytest.fixture(scope="module")
def one_core(
    starts_processes: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], str]:
    (found,), output = trained(tmp_path_factory.mktemp("one"))
    return found, output


def test_python_runs_one_core(one_core: tuple[dict[str, Any], str]) -> None:
    found, output = one_core
    losses = found["losses"]
    assert (found["world"], found["device"]) == (1, "CPU")
    assert losses[-1] < losses[0]
    assert output == f"step 0 · loss {losses[0]:.4g}\nstep 6 · loss {losses[6]:.4g}\n"


def check(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Every rank has the losses and weights of one core."""
    for rank in found:
        assert (rank["world"], rank["device"]) == (len(found), "CPU")
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        for weights, others in zip(rank["weights"], expected["weights"], strict=True):
            assert weights == pytest.approx(others, rel=1e-5, abs=1e-6)


def test_torchrun_runs_rehearsal_ranks_that_train_as_one_core_does(
    one_core: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    expected, printed = one_core
    found, output = trained(tmp_path, *TORCHRUN, "--standalone", "--nproc-per-node=4")
    assert len(found) == 4
    assert output == printed  # by rank 0 only
    check(found, expected)


def test_torchrun_on_two_hosts_without_a_tpu_is_refused(tmp_path: Path) -> None:
    torchrun = dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | {"LOCAL_WORLD_SIZE": "2"}
    variables = {**torchrun, "WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    done = run(tmp_path, ["-c", textwrap.dedent(PREPARED)], PJRT_DEVICE="CPU", **variables)
    assert done.returncode == 1
    assert "torch_xla is rehearsed on one host, and these are 2 hosts" in done.stderr


PREPARED = """
    import os, sys
    from tpunb.worker import standalone
    from tpunb.backends import launchers

    standalone.prepare()
    print("torch" in sys.modules, os.environ.get("PJRT_DEVICE"), len(launchers._active))
"""


def test_standalone_prepare_does_nothing_in_a_rank_of_a_run(tmp_path: Path) -> None:
    done = run(tmp_path, ["-c", textwrap.dedent(PREPARED)], TPUNB_RUN=str(tmp_path))
    assert done.stdout == "False None 0\n", done.stderr


def test_standalone_without_torch_xla_explains_the_install(tmp_path: Path) -> None:
    # -S: an interpreter without site-packages.
    script = textwrap.dedent(PREPARED).replace("prepare()", 'prepare(backend="xla")')
    done = run(tmp_path, ["-S", "-c", script])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "tpunb.utils.errors.MissingPackageError: torch_xla is needed for this script and is not "
        f"installed: {INSTALL_XLA}"
    )


ON_A_TPU = """
    import os, sys
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla._internal import tpu

    # This machine has no TPU: torch_xla's calls for one are only recorded.
    tpu.num_available_chips = lambda: 4
    tpu.worker_id = lambda: 1
    tpu.configure_topology = lambda *ranks: print("joined", ranks, flush=True)
    torch_xla.device = lambda: "xla:0"
    xm.get_xla_supported_devices = lambda: ["xla:0"]
    xm.set_replication = lambda *devices: print("replicates", devices, flush=True)
    torch_xla._XLAC._xla_num_devices = lambda: int(os.environ["DEVICES"])
    os.environ.pop("PJRT_DEVICE", None)

    from tpunb.worker import standalone
    from tpunb.backends import launchers

    standalone.prepare()
    xlac = vars(torch_xla._XLAC)
    print(os.environ["PJRT_DEVICE"], "tpunb.backends.xla.rehearsal.install_xla" in sys.modules,
          xlac["_xla_all_reduce"].__class__.__name__, "TPU_PROCESS_ADDRESSES" in os.environ)
    torch_xla.launch(lambda *args: print(args), args=("a",))
"""


def run_on_a_tpu(
    tmp_path: Path, rank: int, world: int, local_rank: int, locals_: int, **env: str
) -> subprocess.CompletedProcess[str]:
    return run(
        tmp_path,
        ["-c", textwrap.dedent(ON_A_TPU)],
        TORCHELASTIC_USE_AGENT_STORE="True",
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(locals_),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
        **env,
    )


def test_standalone_process_on_a_tpu_joins_the_others_unpatched(tmp_path: Path) -> None:
    platform = {"TPU_PROCESS_ADDRESSES": "local", "CLOUD_TPU_TASK_ID": "0"}
    done = run_on_a_tpu(tmp_path, 6, 8, 2, 4, DEVICES="1", **platform)
    assert done.stdout.splitlines() == [
        "joined (2, 4)",
        "replicates ('xla:0', ['xla:0'])",
        "TPU False builtin_function_or_method False",
        "(6, 'a')",
    ], done.stderr
    one_on_each_host = run_on_a_tpu(tmp_path, 1, 2, 0, 1, DEVICES="1")
    assert one_on_each_host.stdout.splitlines()[0] == "joined (0, 1)", one_on_each_host.stderr


def test_standalone_two_devices_in_a_process_are_refused(tmp_path: Path) -> None:
    done = run_on_a_tpu(tmp_path, 0, 4, 0, 4, DEVICES="2")
    assert done.stdout.splitlines()[0] == "joined (0, 4)"
    assert "SetupError: this process has 2 XLA devices, but a rank has one" in done.stderr


SPMD = """
    from tpunb.worker import standalone

    standalone.prepare(spmd=True)
    import numpy, os, torch, torch_xla.distributed.spmd as xs, torch_xla.runtime as xr

    xr.use_spmd()
    cores = xr.global_runtime_device_count()
    x = torch.arange(8.).to("xla")
    xs.mark_sharding(x, xs.Mesh(numpy.arange(cores), (cores,), ("data",)), ("data",))
    print(cores, (x * 2).sum().item())
"""


@pytest.mark.parametrize(("env", "cores"), [({}, 4), ({"CPU_NUM_DEVICES": "2"}, 2)])
def test_spmd_script_drives_rehearsal_cores(
    tmp_path: Path, env: dict[str, str], cores: int
) -> None:
    done = run(tmp_path, ["-c", textwrap.dedent(SPMD)], **env)
    assert done.stdout == f"{cores} 56.0\n", done.stderr


def test_spmd_under_torchrun_with_several_processes_is_refused(tmp_path: Path) -> None:
    ranks = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "1", "LOCAL_RANK": "1"}
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    done = run(tmp_path, ["-c", textwrap.dedent(SPMD)], **ranks, **sizes)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "tpunb.utils.errors.SetupError: torchrun has started 2 processes of this script on "
        "this host, but the script uses SPMD, in which one process drives all cores of a host: "
        "start it with `python script.py`"
    )
