"""Notebooks of torch_xla rewritten for TorchTPU: whole ones, and each kind of name."""

from __future__ import annotations

import ast

import pytest

from tests.notebook.lint.notebooks import notebook as lint_notebook
from tests.notebook.migrate.notebooks import notebook, sources
from tests.notebook.migrate.torchtpu.examples import COMPLETE, INCOMPLETE
from tpunb.notebook.lint.linter import lint
from tpunb.notebook.migrate import Migration, migrate
from tpunb.notebook.migrate.report import MARK
from tpunb.notebook.models import Cell, Snapshot
from tpunb.notebook.parsing import parse_cells

HEAD = (
    "import torch\nimport torch_xla\nimport torch_xla.core.xla_model as xm\n"
    "import torch_xla.runtime as xr\nimport torch_xla.distributed.parallel_loader as pl\n"
)


def to_torchtpu(*cells: str) -> Migration:
    """Migrate; checks that a second migration changes nothing."""
    made = migrate(notebook(*cells), to="torchtpu")
    assert not migrate(made.notebook, to="torchtpu").diff()
    return made


def problems(made: Migration) -> list[object]:
    texts = sources(made)
    cells = tuple(Cell(at, "code", text, at + 1) for at, text in enumerate(texts))
    parsed = parse_cells(Snapshot(cells, None, None, "a test"))
    return [cell.problem for cell in parsed if cell.problem is not None]


def code(text: str) -> str:
    """A cell without the comments of a migration and without imports."""
    lines = [line for line in text.split("\n") if MARK not in line and "import " not in line]
    return "\n".join(lines).strip()


@pytest.mark.parametrize("name", COMPLETE)
def test_a_notebook_is_rewritten_completely(name: str) -> None:
    made = to_torchtpu(*COMPLETE[name])
    assert made.left == ()
    assert not problems(made)
    for text in sources(made):
        assert not any(
            "xla" in line for line in text.split("\n") if not line.lstrip().startswith("#")
        )
    assert not lint(lint_notebook(*sources(made)), rules=["undefined-name"])


def test_a_block_of_which_nothing_is_left_gets_a_pass() -> None:
    block = "if x:\n    del os.environ['XLA_FLAGS']\n    xm.mark_step()\n    xm.mark_step()"
    made = to_torchtpu(HEAD + "import os\nx = 0", block)
    assert not problems(made)
    assert code(sources(made)[1]).split("\n")[-1] == "    pass"


def test_a_cell_of_which_nothing_is_left_has_no_further_changes() -> None:
    assert sources(to_torchtpu(HEAD, "xm.mark_step()"))[1] == ""


@pytest.mark.parametrize("name", INCOMPLETE)
def test_names_that_are_left_are_at_the_top_of_the_report(name: str) -> None:
    cells, left = INCOMPLETE[name]
    made = to_torchtpu(*cells)
    assert {entry.partition(" (")[0] for entry in made.left} >= set(left)
    first = made.report().splitlines()[0]
    assert first.startswith("NOT COMPLETE, names of torch_xla are left: ")
    assert all(f"{entry} (cell [1])" in first for entry in left)
    marked = [change.before for change in made.changes if change.kind == "marked"]
    assert len(marked) >= len(left)
    assert not problems(made)


EXPRESSIONS = {
    "torch_xla.device()": 'torch.device("tpu")',
    "xm.xla_device()": 'torch.device("tpu")',
    "xr.world_size()": "1",
    "xm.xrt_world_size()": "1",
    "xr.global_ordinal()": "0",
    "xm.is_master_ordinal()": "True",
    "xm.master_print('a', 1)": "print('a', 1, flush=True)",
    "xm.rendezvous('x')": "",
    "xm.mark_step()": "",
    "f = lambda *a: xm.mark_step()": "f = lambda *a: None",
    "torch_xla.sync(wait=True)": "torch.accelerator.synchronize()",
    "xm.wait_device_ops()": "torch.accelerator.synchronize()",
    "xm.optimizer_step(o, barrier=True)": "o.step()",
    "xm.optimizer_step(o, optimizer_args={'a': 1})": "o.step(**{'a': 1})",
    "xm.add_step_closure(print, args=(a, b))": "print(a, b)",
    "xm.add_step_closure(print)": "print()",
    "xm.set_rng_state(3)": "torch.manual_seed(3)",
    "x.to('xla')": 'x.to("tpu")',
    "torch.zeros(2, device='xla:1')": 'torch.zeros(2, device="tpu")',
    "x.device.type == 'xla'": 'x.device.type == "tpu"',
    "print('xla', xla)": "print('xla', xla)",
    "torch_xla.amp.autocast(d)": 'torch.autocast("tpu", dtype=torch.bfloat16)',
    "torch.autocast('xla', dtype=t)": 'torch.autocast("tpu", dtype=t)',
    "torch_xla.compile(f, full_graph=True)": "torch.compile(f)",
    "torch.compile(f, backend='openxla', fullgraph=True)": "torch.compile(f, fullgraph=True)",
    "@torch.compile(backend='openxla')\ndef f(x): return x": (
        "@torch.compile()\ndef f(x): return x"
    ),
    "torch.compile(f, backend='aot_eager')": "torch.compile(f, backend='aot_eager')",
    "@torch_xla.compile\ndef f(x): return x": "@torch.compile\ndef f(x): return x",
    "torch_xla.backends.set_mat_mul_precision('default')": (
        'torch.set_float32_matmul_precision("medium")'
    ),
    "xr.initialize_cache('/tmp/x')": "",
    "xm.master_print(met.metrics_report(), flush=True)": "",
    "met.clear_all()": "",
    "x = met.metric_names": None,
    "torch_xla.experimental.eager_mode(True)": "",
    "xu.SampleGenerator(data=(x, 1), sample_count=a // 2)": "[(x, 1)] * (a // 2)",
    "t = xm.RateTracker()": "t = RateTracker()",
    "x = os.environ.get('XLA_FLAGS')": "x = os.environ.get('XLA_FLAGS')",
    "with torch_xla.step():\n    # a\n    f()\n    g()": "# a\nf()\ng()",
    "for x in pl.MpDeviceLoader(loader, d):\n    f(x['a'])": (
        "for x in loader:\n    x = {key: value.to(d) for key, value in x.items()}\n    f(x['a'])"
    ),
    "for i, (x, _) in enumerate(pl.MpDeviceLoader(loader, d)):\n    f(x)": (
        "for i, (x, _) in enumerate(loader):\n    x = x.to(d)\n    f(x)"
    ),
}


@pytest.mark.parametrize("before", EXPRESSIONS)
def test_code_of_a_notebook_without_ranks(before: str) -> None:
    more = "import os\nimport torch_xla.debug.metrics as met\nimport torch_xla.utils.utils as xu\n"
    made = to_torchtpu(f"{HEAD}{more}d = o = a = b = x = xla = loader = f = g = t = 0", before)
    after = EXPRESSIONS[before]
    assert (made.left == ()) == (after is not None)
    assert after is None or code(sources(made)[1]) == after


ON_RANKS = {
    "xr.global_ordinal()": "dist.get_rank()",
    "xr.world_size()": "dist.get_world_size()",
    "xr.local_ordinal(), xr.global_ordinal()": (
        'int(os.environ.get("LOCAL_RANK", 0)), dist.get_rank()'
    ),
    "not xm.is_master_ordinal()": "not (dist.get_rank() == 0)",
    "xm.rendezvous('x')": "dist.barrier()",
    "xm.master_print(f'''a\nb''')": "if dist.get_rank() == 0:\n    print(f'''a\nb''', flush=True)",
    "xm.optimizer_step(o)": "average_gradients(o)\no.step()",
    "x = xm.all_reduce('max', x)": "x = all_reduced(dist.ReduceOp.MAX, x)",
    "x = xm.all_reduce(xm.REDUCE_SUM, x, scale=1 / xr.world_size())": (
        "x = all_reduced(dist.ReduceOp.SUM, x, scale=1 / dist.get_world_size())"
    ),
    "x = xm.mesh_reduce('a', x, lambda v: xr.world_size())": (
        "x = mesh_reduced(x, lambda v: dist.get_world_size())"
    ),
    "xm.save(x, 'f', master_only=False)": "torch.save(to_device(x, \"cpu\"), 'f')",
    "if xm.is_master_ordinal():\n    xm.save(x, 'f')": (
        "if dist.get_rank() == 0:\n    torch.save(to_device(x, \"cpu\"), 'f')"
    ),
    "[xm.save(x, str(i)) for i in range(2)]": None,
}


@pytest.mark.parametrize("before", ON_RANKS)
def test_code_of_a_train_cell(before: str) -> None:
    made = to_torchtpu(HEAD + "o = x = 0", f"%%tpu_train\n{before}")
    after = ON_RANKS[before]
    assert (made.left == ()) == (after is not None)
    if after is not None:
        magic, group, rest = sources(made)[1].partition("\ndist.init_process_group(")
        written = rest.partition(")\n")[2] if group else magic.partition("\n")[2]
        assert code(written) == after
        assert bool(group) == ("dist" in after or "average" in after or "reduced" in after)


def test_the_kernels_own_cells_need_no_process_group() -> None:
    made = to_torchtpu(
        HEAD + "def both():\n    return xr.world_size()\ndef own():\n    xm.rendezvous('a')",
        "print(xr.global_ordinal(), both())\nxm.rendezvous('b')\nown()",
        "%%tpu_train\nboth()",
    )
    assert 'return int(os.environ.get("WORLD_SIZE", 1))' in sources(made)[0]
    assert "def own():\n    pass" in sources(made)[0]
    assert sources(made)[1] == 'print(int(os.environ.get("RANK", 0)), both())\nown()'


def test_objects_need_a_group_for_the_cpu() -> None:
    made = to_torchtpu(HEAD, "%%tpu_train\nimport os\nxm.mesh_reduce('a', 1, max)")
    text = '%%tpu_train\nimport os\n\ndist.init_process_group("cpu:gloo,tpu:tpu_dist")\n'
    assert sources(made)[1] == f"{text}mesh_reduced(1, max)"


LAUNCHES = {
    "torch_xla.launch(run, args=(1, 2))": "run(dist.get_rank(), 1, 2)",
    "torch_xla.launch(run, args=rest)": "run(dist.get_rank(), *rest)",
    "torch_xla.launch(run)": "run(dist.get_rank())",
    "if __name__ == '__main__':\n    torch_xla.launch(run)": (
        "if __name__ == '__main__':\n    run(dist.get_rank())"
    ),
}


@pytest.mark.parametrize("before", LAUNCHES)
def test_a_launch_becomes_a_call_in_a_train_cell(before: str) -> None:
    made = to_torchtpu(f"{HEAD}rest = (3,)\ndef run(index, *more): ...", before)
    load, _, launch = sources(made)
    assert load == "%load_ext tpunb"
    assert launch == f'%%tpu_train\ndist.init_process_group("tpu_dist")\n{LAUNCHES[before]}'
    assert {(c.cell, c.line) for c in made.changes if "launch" in c.before} <= {(1, 1), (1, 2)}


def test_a_launched_script() -> None:
    script = f"%%writefile train.py\n{HEAD}def run(index):\n    xm.master_print(index)\n"
    made = to_torchtpu(f"{script}if __name__ == '__main__':\n    torch_xla.launch(run)")
    (text,) = sources(made)
    assert text.startswith("%%writefile train.py\nimport torch\nimport torch.distributed as dist\n")
    assert text.endswith('    dist.init_process_group("tpu_dist")\n    run(dist.get_rank())')


MODEL = """\
def run(index):
    device = xm.xla_device()
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader:
        loss = model(x.to(device)).sum()
        loss.backward()
        xm.optimizer_step(optimizer)
    return None
"""
WRAPPED = "    model = DDP(model, broadcast_buffers=False)\n"


@pytest.mark.parametrize(
    ("change", "wrapped"),
    [
        (("return None", "torch.save(model.state_dict(), 'f')"), True),
        (("return None", "return model"), False),
        (("return None", "print(model.fc)"), False),
        (("return None", "evaluate(model)"), False),
        (("return None", "other.backward()"), False),
        (("Net().to(device)", "Net(device)"), False),
        (("for x, y", "model = model.half()\n    for x, y"), False),
        (("optimizer = torch", "global optimizer\n    optimizer = torch"), False),
    ],
)
def test_a_model_whose_uses_are_known_gets_ddp(change: tuple[str, str], wrapped: bool) -> None:
    text = MODEL.replace(*change)
    assert text != MODEL
    made = to_torchtpu(
        HEAD + "from nets import *\nloader = other = 0", text, "torch_xla.launch(run)"
    )
    body = sources(made)[2]
    assert (WRAPPED in body) == wrapped
    assert ("average_gradients(optimizer)" in body) != wrapped
    assert ("model.module.state_dict()" in body) == ("state_dict" in text)


def test_loaders_whose_loops_are_elsewhere_get_a_class() -> None:
    made = to_torchtpu(HEAD + "d = loader = 0\ndef f(x): ...", "f(pl.MpDeviceLoader(loader, d))")
    assert sources(made)[1] == "f(OnDevice(loader, d))"
    helpers = [node.name for node in ast.parse(sources(made)[0]).body if hasattr(node, "name")]
    assert helpers == ["OnDevice", "to_device", "f"]


def test_other_names_dist_and_torch() -> None:
    """The new code does not use a name that the notebook has for something else."""
    made = to_torchtpu(HEAD + "dist = 0", "%%tpu_train\nxm.optimizer_step(dist)")
    assert sources(made)[1].endswith("average_gradients(dist)\ndist.step()")
    assert "torch.distributed.all_reduce(" in sources(made)[0]
    assert "import torch.distributed\n" in sources(made)[0]


def test_helpers_are_in_a_cell_that_every_run_contains() -> None:
    step = "def f(o):\n    import torch_xla.core.xla_model as xm\n    xm.optimizer_step(o)"
    made = to_torchtpu(
        "import os", step, "%%tpu_train\nimport torch_xla\nf(1)", "%%tpu_train\nf(2)"
    )
    assert "def average_gradients" in sources(made)[0]
    assert sources(made)[1] == "def f(o):\n    average_gradients(o)\n    o.step()"
    for text in sources(made)[2:]:
        assert 'dist.init_process_group("tpu_dist")' in text


def test_names_that_may_be_others_are_marked() -> None:
    made = to_torchtpu(HEAD + "if fake:\n    xm = Fake()", "xm.mark_step()")
    assert [entry.partition(" (")[0] for entry in made.left][-1] == (
        "torch_xla.core.xla_model.mark_step"
    )
    assert "It may also be your own name" in sources(made)[1]


def test_cells_that_are_not_python_are_reported() -> None:
    made = to_torchtpu("%%bash\nexport PJRT_DEVICE=TPU\npython -m torch_xla.distributed.x")
    assert made.left == ("torch_xla (cell [1], which is not Python)",)
    assert [(c.kind, c.line) for c in made.changes] == [("skipped", 3)]


def test_a_notebook_without_torch_xla_does_not_change() -> None:
    made = to_torchtpu("import torch", "print(torch.ones(2))")
    assert not made.changed
    assert made.report() == "nothing to migrate\n"


def test_a_notebook_of_one_cell_stays_one_below_the_magic() -> None:
    step = "def f(i):\n    xm.optimizer_step(i)\ntorch_xla.launch(f)"
    load, train = sources(to_torchtpu(HEAD + step))
    assert load == "%load_ext tpunb"
    assert train.startswith("%%tpu_train\nimport torch\nimport torch.distributed as dist\n")


def test_train_cells_without_a_cell_above_share_what_they_need() -> None:
    train = "%%tpu_train\nimport torch_xla.core.xla_model as xm\nxm.optimizer_step(o)"
    load, *trains = sources(to_torchtpu("%load_ext tpunb", train, train))
    assert load.startswith("%load_ext tpunb\nimport torch.distributed as dist\n\n\ndef average_")
    assert {text.count("average_gradients(o)") for text in trains} == {1}


@pytest.mark.parametrize("sure", [True, False])
def test_a_process_group_of_the_notebook(sure: bool) -> None:
    group = "dist.init_process_group('xla', init_method='xla://')"
    body = group if sure else f"if flags:\n        {group}"
    function = f"def f(i):\n    {body}\n    print(xr.world_size())"
    head = HEAD + "import torch.distributed as dist\nflags = 0"
    _, _, made, train = sources(to_torchtpu(head, function, "torch_xla.launch(f)"))
    assert made.count("init_process_group") == sure
    assert train.count("init_process_group") == (not sure)


def test_helpers_do_not_take_the_names_of_the_notebook() -> None:
    own = "def to_device(batch): return batch\nd = loader = 0"
    made = sources(to_torchtpu(HEAD + own, "f = pl.MpDeviceLoader(loader, d)\nto_device(1)"))
    assert made[1] == "f = OnDevice(loader, d)\nto_device(1)"
    assert "def to_device_(value, device):" in made[0]
    assert "return (to_device_(batch, self.device)" in made[0]


def test_helpers_of_an_earlier_migration_are_used_again() -> None:
    first = sources(to_torchtpu(HEAD + "d = loader = 0", "f = pl.MpDeviceLoader(loader, d)"))
    more = "import torch_xla.distributed.parallel_loader as pl\ng = pl.MpDeviceLoader(loader, d)"
    second = sources(to_torchtpu(*first, more))
    assert second[:2] == first
    assert second[2] == "g = OnDevice(loader, d)"


def test_braces_in_code_that_is_used_twice() -> None:
    step = "%%tpu_train\nxm.optimizer_step(o[f'{x}'])"
    made = sources(to_torchtpu(HEAD + "o = x = {}", step))
    assert made[1].endswith("average_gradients(o[f'{x}'])\no[f'{x}'].step()")
