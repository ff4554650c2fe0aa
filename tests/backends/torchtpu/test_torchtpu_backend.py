"""`%%tpu_train` without torch_xla, in a real kernel: TorchTPU rehearsed, and plain torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.drivers.kernel import Kernel, Ran, kernel
from tpunb.runs.directory import RunDir, list_runs
from tpunb.runs.spec import RunSpec

PRELUDE = """
import torch, torch.nn as nn, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
X = torch.randn(64, 20)
Y = (X.sum(1) > 0).long()
"""
TRAIN = """
dist.init_process_group({group})
rank, world = dist.get_rank(), dist.get_world_size()
model = DDP(nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2)).to("{device}"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x, y = X[rank::world].to("{device}"), Y[rank::world].to("{device}")
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
total = loss.detach().clone()
dist.all_reduce(total)
found = total.item() / world
print(f"rank {{rank}} of {{world}} on {{loss.device}}")
model = model.module
"""
ON_TPU = TRAIN.format(group='"tpu_dist"', device="tpu")
ON_CPU = TRAIN.format(group='"gloo"', device="cpu")


@pytest.fixture(scope="module")
def nb(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("lab")) as made:
        made.run("%load_ext tpunb\n%tpu_setup --cores 2", "load").good()
        made.run(PRELUDE, "prelude").good()
        yield made


@pytest.fixture(autouse=True)
def _fresh(nb: Kernel) -> None:
    """Each test has the cells of `nb`, and those that it runs."""
    nb.run("%tpu_setup --backend auto", "load").good()
    for name in set(nb.cells) - {"load", "prelude"}:
        del nb.cells[name]


def train(nb: Kernel, source: str, options: str = "") -> Ran:
    return nb.run(f"%%tpu_train {options}\n{dedent(source).strip()}\n", "train")


def last(nb: Kernel) -> RunDir:
    return list_runs(nb.folder / "runs")[-1]


def spec(nb: Kernel) -> RunSpec:
    return last(nb).read_spec()


def test_the_code_decides_what_ranks_train_with(nb: Kernel) -> None:
    ran = train(nb, ON_TPU, "--returns found,model").good()
    assert {"[0] rank 0 of 2 on tpu:0", "[1] rank 1 of 2 on tpu:0"} <= set(ran.stdout.split("\n"))
    assert "Warning" not in ran.screen()
    assert spec(nb).backend == "torchtpu"
    on_tpu = nb.value("found")
    assert nb.value("str(next(model.parameters()).device)") == "cpu"
    ran = train(nb, ON_CPU, "--returns found").good()
    assert "rank 1 of 2 on cpu" in ran.stdout
    assert spec(nb).backend == "torch"
    assert nb.value("found") == pytest.approx(on_tpu, abs=1e-5)
    assert "torch_xla" not in ran.screen()


def test_a_training_of_parameters_that_stayed_on_the_cpu_is_noted(nb: Kernel) -> None:
    note = "no optimizer has changed a parameter on the TPU"
    assert note not in train(nb, ON_TPU).good().screen()
    made_early = ON_TPU.replace("model = DDP(nn.", "net = (nn.").replace(
        '.to("tpu"))\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)',
        ')\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\nmodel = DDP(net.to("tpu"))',
        1,
    )
    assert note in train(nb, made_early).good().screen()


def test_cells_that_were_deleted_do_not_decide(nb: Kernel) -> None:
    nb.run('y = torch.ones(1, device="tpu")', "gone").good()
    del nb.cells["gone"]
    nb.deleted = ["gone"]
    train(nb, "print(sum(range(4)))").good()
    assert spec(nb).backend == "torch"


def test_setup_overrides_the_code(nb: Kernel) -> None:
    nb.run("%tpu_setup --backend torchtpu", "load").good()
    assert nb.value("str(torch.accelerator.current_accelerator())") == "tpu"
    train(nb, "print(torch.accelerator.current_accelerator())").good()
    assert spec(nb).backend == "torchtpu"
    assert "tpu" in last(nb).log.read_text()


def test_setup_looks_at_the_cells_below(nb: Kernel) -> None:
    assert "torchtpu" not in nb.run("%tpu_setup", "load").good().screen()
    nb.cells["later"] = ON_TPU
    shown = nb.run("%tpu_setup", "load").good().screen()
    assert "torchtpu (because " in shown
    assert re.search(r"because cell \[\d+\] has `init_process_group\(", shown)
    nb.cells["later"] = "import torch_xla"  # which is not installed
    assert "torch_xla is not installed" in nb.run("%tpu_setup", "load").good().screen()


@pytest.mark.usefixtures("starts_processes")
def test_what_setup_preloads_serves_the_first_run(tmp_path: Path) -> None:
    with kernel(tmp_path) as made:
        made.run("%load_ext tpunb\n%tpu_setup --cores 2 --backend torchtpu", "load").good()
        before = made.processes()
        made.run(PRELUDE, "prelude").good()  # torch gets the rehearsed device
        made.run(f"%%tpu_train\n{ON_TPU.strip()}", "train").good()
        assert before
        assert set(before) <= set(made.processes())


@pytest.mark.usefixtures("starts_processes")
def test_lines_and_relative_imports_on_torchtpu(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "inner.py").write_text("VALUE = 'src'\n")
    with kernel(tmp_path) as made:
        made.run("import sys\nsys.path.append('src')", "path").good()
        made.run("%load_ext tpunb\n%tpu_setup --cores 2 --backend torchtpu", "load").good()
        lines = "def keep(rank):\n    !touch of-{rank}\n    return _exit_code\n"
        made.run(f"{PRELUDE}\nimport os\n{lines}", "prelude").good()
        train_lines = (
            'rank = int(os.environ["RANK"])\nimport inner\nx = torch.ones(1, device="tpu")\n'
            "!echo {inner.VALUE} {x.device.type}; exit {rank}\n"
            "%cd -q src\nprint(_exit_code, keep(rank))"
        )
        ran = made.run(f"%%tpu_train\n{train_lines}", "train").good()
        assert ran.stdout.count("src tpu") >= 1
        for rank in range(2):
            assert f"[{rank}] {rank} 0\n" in ran.stdout
            assert (tmp_path / "src" / f"of-{rank}").exists()


def test_torch_xla_is_missed_where_the_code_needs_it(nb: Kernel) -> None:
    ran = train(nb, "import torch_xla\nprint(torch_xla.device())")
    assert ran.red_line.startswith(
        "MissingPackageError: torch_xla is needed for %%tpu_train (cell ["
    )
    assert "] has `import torch_xla`) and is not installed: " in ran.red_line
    assert "docs/coming_from.md" in ran.red_line


def test_cells_of_the_kernel_have_the_rehearsed_device(nb: Kernel) -> None:
    nb.run('x = torch.ones(3, device="tpu")', "ordinary").good()
    assert nb.value("x.is_tpu, str(x.device), (x + 1).sum().item()") == (True, "tpu:0", 6.0)
    ran = nb.run("x + torch.ones(3)", "mixed")
    assert "Expected all tensors to be on the same device" in ran.traceback


def test_the_kernel_survives_interrupts_of_its_rehearsed_device(nb: Kernel) -> None:
    nb.run('x = torch.ones(2, device="tpu", requires_grad=True)', "ordinary").good()
    for _ in range(20):  # without a name of the device, in which tpunb would prepare it
        ran = nb.send("print('begun')\nwhile True: x = (x * 1).detach().requires_grad_()")
        nb.until(ran, "begun")
        nb.interrupt()
        assert nb.wait(ran).reply["ename"] == "KeyboardInterrupt"
    assert nb.value("str(x.device)") == "tpu:0"


TIED = """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

def tied():
    model = Tied()
    return model.to("tpu")

model = tied()
{}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model.head(model.embed(torch.arange(9, device="tpu"))).sum().backward()
    optimizer.step()
"""


def test_tied_weights_that_a_move_parts_are_named(nb: Kernel) -> None:
    parted = (
        'line 10: return model.to("tpu"): this move makes embed.weight and head.weight, which were '
        "one parameter, two"
    )
    assert train(nb, TIED.format("")).good().screen().count(parted) == 1
    again = train(nb, TIED.format("model.head.weight = model.embed.weight")).good()
    assert "one parameter" not in again.screen()


@pytest.mark.parametrize(("group", "device"), [('"tpu_dist"', "tpu"), ('"gloo"', "cpu")])
def test_a_collective_that_differs_names_ranks_and_lines(
    nb: Kernel, group: str, device: str
) -> None:
    ran = train(
        nb,
        f"""
        dist.init_process_group({group})
        x = torch.ones(3 + dist.get_rank(), device="{device}")
        dist.all_reduce(x)
        """,
    )
    assert "failed in cell" in ran.red_line
    shown = ran.screen()
    assert "MismatchError: the ranks called different collectives at the same time" in shown
    assert "rank 0: all_reduce sum of float32[3]" in shown
    assert "rank 1: all_reduce sum of float32[4]" in shown
    assert "line 4: dist.all_reduce(x)" in shown


def test_steps_and_collectives_are_counted(nb: Kernel) -> None:
    ran = train(nb, ON_TPU).good()
    [run] = [list_runs(nb.folder / "runs")[-1]]
    assert run.read_spec().backend == "torchtpu"
    assert "collectives" in ran.status
    assert nb.value("__import__('tpunb').last_run.backend") == "torchtpu"


def test_a_prelude_that_used_the_device_is_forked(nb: Kernel) -> None:
    nb.run(
        'weights = torch.ones(4, 4, device="tpu") @ torch.ones(4, 4, device="tpu")', "use"
    ).good()
    ran = train(nb, 'print("sum", weights.sum().item(), weights.device)').good()
    assert "sum 64.0 tpu:0" in ran.stdout
    assert spec(nb).replicate is None


def test_helpers_train_as_with_torch_xla(nb: Kernel) -> None:
    ran = train(
        nb,
        """
        import tpunb
        from tpunb.training import Accumulation, predict, shard
        dist.init_process_group("tpu_dist")
        torch.manual_seed(0)
        model = nn.Linear(20, 2).to("tpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulation = Accumulation(optimizer, every=2, max_norm=1.0)
        data = torch.utils.data.TensorDataset(X, Y)
        for (x, y), mask in shard(data, 16):
            losses = nn.functional.cross_entropy(model(x.to("tpu")), y.to("tpu"), reduction="none")
            update = accumulation.backward(losses, mask.to("tpu"))
            if update:
                tpunb.log(loss=update.loss)
        accumulation.finish()
        tpunb.save({"model": model.state_dict()}, 1)
        rows = predict(model, X, 16)
        sums = torch.stack([p.sum() for p in model.parameters()]).cpu()
        print("sums", [round(s, 4) for s in sums.tolist()], None if rows is None else rows.shape)
        """,
    ).good()
    lines = [line for line in ran.stdout.split("\n") if "sums" in line]
    assert "torch.Size([64, 2])" in lines[0] + lines[1]
    assert len({line.split("sums")[1].split("]")[0] for line in lines}) == 1
    loaded = "__import__('tpunb').load(__import__('tpunb').last_run.dir / 'checkpoints')"
    assert nb.value(f"str({loaded}['model']['weight'].device)") == "cpu"


def test_profile_writes_a_trace_of_torch_s_own(nb: Kernel) -> None:
    ran = train(nb, ON_TPU, "--profile 0:2-4").good()
    [file] = last(nb).profile.rglob("*.json")
    assert file.name == "rank-0.pt.trace.json"
    assert "traceEvents" in file.read_text()
    assert "ui.perfetto.dev" in ran.status


@pytest.mark.parametrize(
    ("group", "device"),
    [('"tpu_dist"', "tpu"), ('"cpu:gloo,tpu:tpu_dist"', "tpu"), ('"gloo"', "cpu")],
)
def test_one_rank_has_a_process_group(nb: Kernel, group: str, device: str) -> None:
    ran = train(
        nb,
        f"""
        dist.init_process_group({group})
        model = DDP(nn.Linear(20, 1).to("{device}"))
        model(X.to("{device}")).sum().backward()
        print(dist.get_world_size(), "rank with", model.module.weight.grad.device)
        """,
        "--cores 1",
    ).good()
    assert "1 rank with " + ("tpu:0" if device == "tpu" else "cpu") in ran.stdout
