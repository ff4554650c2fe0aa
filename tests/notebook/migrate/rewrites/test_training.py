"""Notebooks made for `%%tpu_train`."""

from __future__ import annotations

import pytest

from tests.notebook.migrate.notebooks import migrated, notebook, sources
from tpunb.notebook.migrate import migrate
from tpunb.notebook.migrate.rewrites import training

LOAD = "%load_ext tpunb"


@pytest.mark.parametrize(
    "cell",
    [
        "torch_xla.launch(f, args=())",
        "%%time\nif tpu:\n    torch_xla.launch(f)",
        "from accelerate import notebook_launcher\nnotebook_launcher(f)",
        "with x:\n    accelerate.notebook_launcher(f)",
        "start()",
        "learner.start()",
    ],
)
def test_a_cell_that_starts_ranks_gets_the_magic_at_its_top(cell: str) -> None:
    before = "def start():\n    torch_xla.launch(f)"
    assert migrated(before, cell, "x = 1", train=True) == [
        LOAD,
        before,
        f"%%tpu_train\n{cell}",
        "x = 1",
    ]


def test_an_old_launch_is_rewritten_and_then_gets_the_magic() -> None:
    made = migrated(
        "import torch_xla\nimport torch_xla.distributed.xla_multiprocessing as xmp",
        "%%time\nxmp.spawn(f, nprocs=8, start_method='fork')",
        train=True,
    )
    assert made == [
        LOAD,
        "import torch_xla",
        "%%tpu_train\n%%time\ntorch_xla.launch(f, start_method='fork')",
    ]


@pytest.mark.parametrize(
    "cells",
    [
        ("def f():\n    torch_xla.launch(g)",),
        ("browser.launch(url)", "lambda: torch_xla.launch(g)"),
        ("%load_ext tpunb", "%%tpu_train --cores 2\ntorch_xla.launch(g)"),
        ("%load_ext tpunb.kernel.magics", "%%tpu_debug\ntorch_xla.launch(g)"),
        ("x = 1",),
    ],
)
def test_nothing_is_added_where_there_is_nothing_to_do(cells: tuple[str, ...]) -> None:
    assert migrated(*cells, train=True) == list(cells)


@pytest.mark.parametrize(
    "launch",
    [
        "import torch_xla.distributed.xla_multiprocessing as xmp\nxmp.spawn(f, nprocs=1)",
        "import torch_xla\ntorch_xla.launch(f, debug_single_process=True)",
        "from accelerate import notebook_launcher\nnotebook_launcher(f, num_processes=1)",
    ],
)
def test_one_process_stays_one_core(launch: str) -> None:
    made = migrated(launch, train=True)
    assert made[1].startswith("%%tpu_train --cores 1\n")


def test_a_notebook_without_a_place_for_the_magic_is_told() -> None:
    made = migrate(notebook("import torch_xla", "for x in data: step(x)"), train=True)
    assert sources(made) == ["import torch_xla", "for x in data: step(x)"]
    [change] = made.changes
    assert (change.kind, change.what[:30]) == ("skipped", "no cell calls torch_xla.launch")


def test_what_later_cells_need_becomes_a_cell_above_the_launch() -> None:
    made = migrated(
        "import torch_xla\n\ndef f(i):\n    print(i)\n\n# go\ntorch_xla.launch(f)\nx = 1",
        "@once\ndef g(i):\n    f(i)\ntorch_xla.launch(g)",
        train=True,
    )
    assert made == [
        LOAD,
        "import torch_xla\n\ndef f(i):\n    print(i)",
        "%%tpu_train\n# go\ntorch_xla.launch(f)\nx = 1",
        "%%tpu_train\n@once\ndef g(i):\n    f(i)\ntorch_xla.launch(g)",
    ]


@pytest.mark.parametrize(
    ("head", "train"),
    [
        ("from transformers import Trainer", "trainer = Trainer(model)\ntrainer.train()"),
        ("import lightning as L", "L.Trainer(max_epochs=1).fit(model, loader)"),
        (
            "from transformers import Trainer\nclass Mine(Trainer): ...\n"
            "def main():\n    trainer = Mine(model)\n    trainer.train()",
            "main()",
        ),
        (
            "from accelerate import Accelerator",
            "accelerator = Accelerator()\nfor batch in accelerator.prepare(loader):\n"
            "    accelerator.backward(model(batch))",
        ),
    ],
)
def test_the_cell_in_which_a_framework_trains_gets_the_magic(head: str, train: str) -> None:
    made = migrated(head, train, "x = 1", train=True)
    assert made == [LOAD, head, f"%%tpu_train\n{train}", "x = 1"]
    assert migrated(*made, train=True) == made


def test_a_trainer_that_is_made_above_moves_into_the_train_cell() -> None:
    head, make = "from transformers import Trainer", "trainer = Trainer(\n    model\n)"
    made = migrate(notebook(f"{head}\n{make}\nx = 1", "y = x", "trainer.train()"), train=True)
    cells = [LOAD, f"{head}\nx = 1", "y = x", f"%%tpu_train\n{make}\ntrainer.train()"]
    assert sources(made) == cells
    [told] = [change for change in made.changes if change.what == training.MOVED]
    assert (told.cell, told.line, told.kind) == (0, 2, "rewritten")
    assert migrated(*cells, train=True) == cells


@pytest.mark.parametrize("between", ["print(trainer.args)", "%%time\nprint(trainer)"])
def test_a_trainer_that_other_cells_use_above_the_train_cell_is_told(between: str) -> None:
    cells = ("from transformers import Trainer\ntrainer = Trainer(model)", between)
    made = migrate(notebook(*cells, "trainer.train()"), train=True)
    assert sources(made) == [LOAD, *cells, "%%tpu_train\ntrainer.train()"]
    [told] = [change for change in made.changes if change.kind == "skipped"]
    assert (told.cell, told.line, told.what) == (0, 2, training.MADE_ABOVE)


def test_a_trainer_that_cells_below_use_stays_in_the_train_cell() -> None:
    train = "args = Arguments()\ntrainer = Trainer(model, args)\ntrainer.train()"
    made = migrate(
        notebook("from transformers import Trainer", train, "print(args)\ntrainer.evaluate()"),
        train=True,
    )
    assert sources(made)[2:4] == [
        "args = Arguments()",
        "%%tpu_train\ntrainer = Trainer(model, args)\ntrainer.train()",
    ]
    [told] = [change for change in made.changes if change.kind == "skipped"]
    assert (told.cell, told.line) == (2, 2)
    assert told.what == training.NOT_RETURNABLE.format("trainer")


def test_what_cells_below_use_of_a_train_cell_is_returned() -> None:
    head = "import lightning as L\nnet = Net()\nlosses = []"
    train = "L.Trainer(max_epochs=1).fit(net, loader)\nlosses.append(1)\nscore = 1"
    made = migrate(notebook(head, train, "print(net(x), losses, score)"), train=True)
    assert sources(made)[2] == f"%%tpu_train --returns losses,net,score\n{train}"
    assert made.changes[-1].what == "added --returns losses,net,score: cells below use it"
    assert migrated(*sources(made), train=True) == sources(made)


@pytest.mark.parametrize(
    ("head", "train", "name"),
    [
        (
            "from fastai.vision.all import *",
            "learn = vision_learner(dls, resnet18)\nlearn.fine_tune(1)",
            "fastai",
        ),
        (
            "from ignite.engine import Engine",
            "trainer = Engine(update)\ntrainer.run(loader, max_epochs=2)",
            "ignite",
        ),
    ],
)
def test_a_framework_without_gradients_of_all_cores_is_told_where_it_trains(
    head: str, train: str, name: str
) -> None:
    made = migrate(notebook(head, train), train=True)
    assert sources(made) == [head, train]
    [told] = made.changes
    assert (told.cell, told.line, told.kind) == (1, 2, "skipped")
    assert told.what.startswith(f"trains with {name}, which does not average")


@pytest.mark.parametrize(
    "cell",
    [
        "from mine import Trainer\ntrainer = Trainer()\ntrainer.train()",
        "import transformers\nmodel.train()\nclass Trainer: ...\nt = Trainer()\nt.train()",
        "import fastai\nscaler.fit(x)",
        "import ignite, subprocess\nsubprocess.run(['ls'])",
    ],
)
def test_what_is_no_framework_gets_no_magic(cell: str) -> None:
    assert migrated(cell, train=True) == [cell]
