"""Programs that torch's documentation and others' show, on two ranks: with one process's losses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.torchtpu import programs
from tests.drivers.kernel import Kernel, Ran, kernel

DEVICES = {"torchtpu": '"tpu", "tpu_dist"', "torch": '"cpu", "gloo"'}
"""By backend: the names `DEVICE` and `GROUP` of the programs."""


@pytest.fixture(scope="module", params=DEVICES)
def nb(
    request: pytest.FixtureRequest, starts_processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Kernel]]:
    """A kernel for each backend, and the backend."""
    backend = request.param
    with kernel(tmp_path_factory.mktemp("lab")) as made:
        made.run(f"%load_ext tpunb\n%tpu_setup --cores 2 --backend {backend}", "load").good()
        made.run(f"import os\n\nDEVICE, GROUP = {DEVICES[backend]}", "device").good()
        yield backend, made


def run(nb: Kernel, name: str, options: str = "--returns losses") -> Ran:
    """Train with a program: its cells above, then its train cell."""
    nb.start_over("load", "device")
    nb.run(nb.cells["device"], "device").good()
    nb.run(getattr(programs, name), "program").good()
    return nb.run(f"%%tpu_train {options}\n{getattr(programs, f'{name}_RUN').strip()}", "train")


def assert_as_one_process(nb: Kernel, name: str) -> None:
    nb.run(f"# tpu: skip\n{getattr(programs, f'{name}_ALONE').strip()}", "alone").good()
    losses, alone = nb.value("losses"), nb.value("alone")
    assert len(losses) >= 2
    assert losses == pytest.approx(alone, rel=0, abs=1e-5)


@pytest.mark.parametrize("name", ["DDP", "TENSOR_PARALLEL"])
def test_tutorials_of_torch_have_the_losses_of_one_process(
    nb: tuple[str, Kernel], name: str
) -> None:
    backend, notebook = nb
    ran = run(notebook, name).good()
    told = [line for line in ran.screen().split("\n") if "lint:" in line]
    assert all("waits for the device in every step" in line for line in told)
    assert_as_one_process(notebook, name)
    assert notebook.value("__import__('tpunb').last_run.backend") == backend


@pytest.mark.parametrize("name", ["ACCELERATE", "TRAINER", "LIGHTNING"])
def test_libraries_use_all_ranks_or_refuse(nb: tuple[str, Kernel], name: str) -> None:
    backend, notebook = nb
    ran = run(notebook, name)
    if backend == "torch" or name == "LIGHTNING":  # on processors
        ran.good()
        assert_as_one_process(notebook, name)
    else:
        assert "SetupError: this Accelerator does not know the other 1 rank" in ran.red_line
        assert "accelerate does not know TorchTPU. Use --cores 1" in ran.red_line


def test_lightning_that_would_train_alone_is_refused(nb: tuple[str, Kernel]) -> None:
    _, notebook = nb
    notebook.start_over("load", "device")
    notebook.run(programs.LIGHTNING, "program").good()
    notebook.run(f"%%tpu_train\n{programs.LIGHTNING_REFUSED}", "train").good()


def test_an_accelerator_that_a_cell_above_has_made_counts_the_ranks(nb: tuple[str, Kernel]) -> None:
    backend, notebook = nb
    notebook.start_over("load", "device")
    notebook.run("from accelerate import Accelerator\naccelerator = Accelerator()", "above").good()
    ran = notebook.run("%%tpu_train\nprint(accelerator.num_processes)", "train")
    if backend == "torch":
        assert "[0-1] 2" in ran.good().stdout
    else:
        assert "SetupError: this Accelerator does not know" in ran.red_line


def test_ranks_that_trained_alone_or_different_models_are_told_from_parts(
    nb: tuple[str, Kernel],
) -> None:
    _, notebook = nb
    notebook.start_over("load", "device")
    notebook.run(notebook.cells["device"], "device").good()
    notebook.run(programs.TRAINED, "program").good()
    found = {}
    for name, (_, cell) in programs.TRAINED_RUNS.items():
        cores = "--cores 1" if name == "one rank" else ""
        ran = notebook.run(f"%%tpu_train {cores}\n{cell.strip()}", "train").good()
        said = {"trained by itself": "alone", "different models": "different"}
        line = ran.status.splitlines()[0]
        found[name] = "".join(kind for words, kind in said.items() if words in line)
    assert found == {name: kind for name, (kind, _) in programs.TRAINED_RUNS.items()}
