"""Every notebook of this repository runs to its end and prints the figures that it claims."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Each test starts a kernel and several training runs, possibly on a busy machine.
pytestmark = [pytest.mark.usefixtures("lent"), pytest.mark.timeout(900)]

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
FRAMEWORKS = sorted((NOTEBOOKS / "frameworks").glob("*.ipynb"))
SHOWS = {
    "00_quickstart": r"assert accurac\S+ >= 0\.9",  # in its own cell
    "01_spawn_unchanged": r"assert accurac\S+ >= 0\.9",
    "11_static_shapes": r"\d+ compilations became \d+, .* of 250 paragraphs classified correctly",
    "12_inference_on_all_cores": r"one core: .* 2 cores: (.|\n)* returned all 1797, in order",
    "13_big_batches": r"by hand +\d.*\nAccumulation +\d.* 8 +\d",
    "14_resume": r"not stopped: 0\.\d*[1-9]\d* with the weights alone, 0\.000 with everything",
}
"""Pattern of each notebook's last output: the figures before and after."""
NEAR = r"(0e\+00|\de-(0[5-9]|1\d))"
"""Allowed difference of losses from plain PyTorch: below 1e-4, as formatted by `.0e`."""
MODELS = {
    "big_batch_gan": (
        "steps=150",
        r"GAN on 2 rehearsal cores: [89]\d\.\d% of the digits read as asked, "
        r"diversity (0\.[5-9]|1\.0)\d, Fréchet distance [0-3]\.\d\d \(real ones 0\.\d\d\); "
        rf"first losses within {NEAR} of plain PyTorch; "
        r"1 program for training, 1 for evaluation; [\d,]+ images a second",
    ),
    "dlrm": (
        "samples=20000 tables=[2000,500,100,10]",
        r"DLRM on 2 rehearsal cores: AUC 0\.8[0-6]\d, with the hidden weights 0\.88\d; "
        rf"losses within {NEAR} of plain PyTorch; "
        r"after the first step 1 program for training, 1 for evaluation; [\d,]+ samples a second",
    ),
    "llm_decoder_spmd": (
        "layers=1 window=64 width=64 steps=100 batch_size=6",
        r"Llama on 2 rehearsal cores \(SPMD\): [34]\d\.\d% of the next bytes right, "
        r"[23]\.\d+ bits for each; "
        rf"losses within {NEAR} of plain PyTorch; "
        r"after the first step 1 program for training, 1 for evaluation; [\d,]+ bytes a second",
    ),
    "segmentation_unet": (
        "pictures=300 features=[8,16] size=20",
        r"U-Net on 2 rehearsal cores: mean IoU 0\.[5-8]\d+, of the worst class \(.*\) 0\.\d+, "
        r"9\d\.\d% of the pixels right; "
        rf"losses within {NEAR} of plain PyTorch; "
        r"1 program for training, 1 for evaluation; [\d,]+ pictures a second",
    ),
    "translation_transformer": (
        "texts=110 layers=1 width=64 longest=10 epochs=12 lr=6e-3",
        r"Transformer on 2 rehearsal cores: [6-9]\d\.\d% of the tokens right, .*; "
        rf"losses within {NEAR} of plain PyTorch; "
        r"after the first step 1 program for training, 1 for evaluation; [\d,]+ texts a second",
    ),
    "bert_glue": (
        "layers=1 longest=24 lengths=1 epochs=4 lr=4e-3",
        r"BERT on 2 rehearsal cores: [678]\d\.\d% of 200 sentences right; "
        rf"losses within {NEAR} of plain PyTorch; "
        r"after the first step 1 program for training, 1 for evaluation; [\d,]+ sentences a second",
    ),
    "cnn_first_steps": (
        "epochs=4 width=8",
        r"accuracy 0\.9\d+ after 4 epochs on 2 rehearsal cores, 0\.9\d+ after 2 more; "
        rf"losses within {NEAR} of plain PyTorch; "
        r"1 program for training, 1 for evaluation; [\d,]+ images a second",
    ),
    "resnet50_images": (
        "model_name=test_resnet epochs=2",
        r"test_resnet: accuracy 0\.9\d+ after 2 epochs on 2 rehearsal cores; "
        rf"the first loss within {NEAR} of plain PyTorch; "
        r"1 program for training, 1 for evaluation; [\d,]+ images a second of 0\.024 GFLOP",
    ),
}
"""For the notebooks of the gallery: `name=value` pairs for papermill that make the training
smaller, and the pattern of the last cell's line: the model has learned, with one process's losses.
"""
ON_TORCHTPU = {"llm_decoder_fsdp2"}
"""Models that tests/long/test_torchtpu_notebooks.py runs."""
FAULTS = {
    "no gradient at any step: model.extra.weight, model.extra.bias": "optimizer.step()",
    "recompiled at step 4 ": "if step == 3:",
    "recompiled at step 9 ": "x, y = x.to(device), y.to(device)",
    ".item() reads a value from the device, at every step": "total += loss.item()",
    "gradients are not reduced before this step": "optimizer.step()",
}
"""What %%tpu_debug finds in 10_one_core_debugging, and the line that it names."""


def execute(
    notebook: Path, folder: Path, parameters: str = "", cores: int | None = 2
) -> tuple[str, list[dict[str, Any]]]:
    """The lines of `tpunb run`, and the executed cells."""
    given = [word for pair in parameters.split() for word in ("-p", *pair.split("="))]
    given += ["--cores", str(cores)] if cores else []
    done = subprocess.run(
        [sys.executable, "-m", "tpunb", "run", *given, notebook, "out.ipynb"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    cells: list[dict[str, Any]] = json.loads((folder / "out.ipynb").read_text())["cells"]
    return done.stdout, cells


def shown(cell: dict[str, Any]) -> str:
    """The text below a cell, which may be split into several outputs."""
    texts = (o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell["outputs"])
    return "".join("".join(text) for text in texts)


def all_shown(cells: list[dict[str, Any]]) -> str:
    return "\n".join(shown(cell) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("name", SHOWS)
def test_notebook_shows_its_figures(name: str, tmp_path: Path) -> None:
    parameters = "epochs=8" if name == "00_quickstart" else ""
    said, cells = execute(NOTEBOOKS / f"{name}.ipynb", tmp_path, parameters)
    assert f"{name}: succeeded on 2 rehearsal cores in " in said
    printed = all_shown(cells)
    checked = "\n".join("".join(cell["source"]) for cell in cells) if name < "1" else printed
    assert re.search(SHOWS[name], checked), printed
    # There the cells that train on one core get two, and so all of the data twice.
    assert name == "11_static_shapes" or "lint:" not in printed


@pytest.mark.parametrize("name", MODELS)
def test_model_notebook_reaches_its_claimed_result(name: str, tmp_path: Path) -> None:
    parameters, pattern = MODELS[name]
    _, cells = execute(NOTEBOOKS / "models" / f"{name}.ipynb", tmp_path, parameters)
    printed = all_shown(cells)
    assert re.search(f"^{pattern}$", printed, re.MULTILINE), printed
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("notebook", FRAMEWORKS, ids=lambda path: path.stem)
def test_framework_notebook_trains_two_ranks_to_the_same_weights(
    notebook: Path, tmp_path: Path
) -> None:
    said, cells = execute(notebook, tmp_path)
    assert f"{notebook.stem}: succeeded on 2 rehearsal cores" in said
    checks = [cell for cell in cells if "assert " in "".join(cell["source"])]
    assert checks
    for cell in checks:
        found = r"2 ranks, other data, the same weights; accuracy ([\d.]+)%"
        accuracy = re.search(found, shown(cell))
        assert accuracy, shown(cell)
        assert float(accuracy[1]) > 80


def test_spmd_notebook_has_the_losses_of_plain_torch(tmp_path: Path) -> None:
    said, cells = execute(NOTEBOOKS / "02_spmd.ipynb", tmp_path, cores=4)
    lines = said.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("02_spmd: succeeded on 4 rehearsal cores (SPMD) in ")
    printed = all_shown(cells)
    assert "4 cores: the same 110 losses as plain PyTorch" in printed
    assert "sharded as {devices=[4,1]0,1,2,3}: the same losses, and whole weights" in printed
    assert "lint:" not in printed


def test_debug_notebook_report_finds_each_fault(tmp_path: Path) -> None:
    _, cells = execute(NOTEBOOKS / "10_one_core_debugging.ipynb", tmp_path, cores=None)
    every = [shown(cell) for cell in cells if cell["cell_type"] == "code"]
    before, after = (text for text in every if "%%tpu_debug: " in text)
    found = re.findall(r"^\d\. (.*)\n +cell \[\d+\], line \d+: (.*)$", before, re.MULTILINE)
    assert len(found) == len(FAULTS), before
    for title, line in FAULTS.items():
        assert [source for issue, source in found if issue.startswith(title)] == [line], before
    assert "no issues found" in after
    assert "lint:" not in "".join(every)
    assert re.search(r"\d+\.\d% of 1247 digits classified correctly", every[-1])


def test_notebooks_are_saved_without_outputs() -> None:
    for path in NOTEBOOKS.rglob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        assert not any(c.get("outputs") or c.get("execution_count") for c in cells), path


def test_gallery_and_frameworks_are_complete() -> None:
    models = sorted((NOTEBOOKS / "models").glob("*.ipynb"))
    assert {path.stem for path in models} == {*MODELS, *ON_TORCHTPU}
    page = (NOTEBOOKS.parent / "docs/gallery.md").read_text()
    assert [path for path in models if f"models/{path.name}" not in page] == []
    done = subprocess.run(
        [sys.executable, "-m", "tpunb", "lint", "--json", *models], capture_output=True, text=True
    )
    assert json.loads(done.stdout) == [], done.stdout
    for path in FRAMEWORKS:
        cells = json.loads(path.read_text())["cells"]
        library = path.stem.partition("_")[2]
        first = "".join(cells[0]["source"])
        assert re.search(rf"run\s+with\s+{library} \d+\.\d+\.\d+", first), first
        assert f'print("{library}", ' in "".join(cells[2]["source"])
