"""The gallery's notebooks: each trains at a small size and prints the figures that it claims."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

# Each test starts a kernel and several training runs.
pytestmark = pytest.mark.usefixtures("lent")

ROOT = Path(__file__).parents[2] / "notebooks" / "models"

NEAR = r"(0e\+00|\de-(0[5-9]|1\d))"
"""Allowed difference of losses from plain PyTorch: below 1e-4, as formatted by `.0e`."""


class Shown(NamedTuple):
    """Parameters for a test of one notebook, and its result."""

    parameters: str
    """`name=value` pairs for papermill that make the training smaller than the default."""
    pattern: str
    """Pattern of the last cell's line: the model has learned, with the losses of one process."""


SHOWS = {
    "big_batch_gan": Shown(
        "steps=150",
        r"GAN on 2 rehearsal cores: [89]\d\.\d% of the digits read as asked, "
        r"diversity (0\.[5-9]|1\.0)\d, Fréchet distance [0-3]\.\d\d \(real ones 0\.\d\d\); "
        rf"first losses within {NEAR} of plain PyTorch; "
        r"1 program for training, 1 for evaluation; [\d,]+ images a second",
    ),
    "dlrm": Shown(
        "samples=20000 tables=[2000,500,100,10]",
        r"DLRM on 2 rehearsal cores: AUC 0\.8[0-6]\d, with the hidden weights 0\.88\d; "
        rf"losses within {NEAR} of plain PyTorch; "
        r"after the first step 1 program for training, 1 for evaluation; [\d,]+ samples a second",
    ),
    "llm_decoder_spmd": Shown(
        "layers=1 window=64 width=64 steps=100 batch_size=6",
        r"Llama on 2 rehearsal cores \(SPMD\): [34]\d\.\d% of the next bytes right, "
        r"[23]\.\d+ bits for each; "
        rf"losses within {NEAR} of plain PyTorch; "
        r"after the first step 1 program for training, 1 for evaluation; [\d,]+ bytes a second",
    ),
    "segmentation_unet": Shown(
        "pictures=300 features=[8,16] size=20",
        r"U-Net on 2 rehearsal cores: mean IoU 0\.[5-8]\d+, of the worst class \(.*\) 0\.\d+, "
        r"9\d\.\d% of the pixels right; "
        rf"losses within {NEAR} of plain PyTorch; "
        r"1 program for training, 1 for evaluation; [\d,]+ pictures a second",
    ),
    "translation_transformer": Shown(
        "texts=110 layers=1 width=64 longest=10 epochs=12 lr=6e-3",
        r"Transformer on 2 rehearsal cores: [6-9]\d\.\d% of the tokens right, .*; "
        rf"losses within {NEAR} of plain PyTorch; "
        r"after the first step 1 program for training, 1 for evaluation; [\d,]+ texts a second",
    ),
    "bert_glue": Shown(
        "layers=1 longest=24 lengths=1 epochs=4 lr=4e-3",
        r"BERT on 2 rehearsal cores: [678]\d\.\d% of 200 sentences right; "
        rf"losses within {NEAR} of plain PyTorch; "
        r"after the first step 1 program for training, 1 for evaluation; [\d,]+ sentences a second",
    ),
    "cnn_first_steps": Shown(
        "epochs=4 width=8",
        r"accuracy 0\.9\d+ after 4 epochs on 2 rehearsal cores, 0\.9\d+ after 2 more; "
        rf"losses within {NEAR} of plain PyTorch; "
        r"1 program for training, 1 for evaluation; [\d,]+ images a second",
    ),
    "resnet50_images": Shown(
        "model_name=test_resnet epochs=2",
        r"test_resnet: accuracy 0\.9\d+ after 2 epochs on 2 rehearsal cores; "
        rf"the first loss within {NEAR} of plain PyTorch; "
        r"1 program for training, 1 for evaluation; [\d,]+ images a second of 0\.024 GFLOP",
    ),
}


@pytest.mark.timeout(900)  # a kernel and several runs, possibly on a busy machine
@pytest.mark.parametrize("name", SHOWS)
def test_model_notebook_reaches_its_claimed_result(name: str, tmp_path: Path) -> None:
    shown = SHOWS[name]
    given = [word for pair in shown.parameters.split() for word in ("-p", *pair.split("="))]
    command = [sys.executable, "-m", "tpunb", "run", *given, "--cores", "2"]
    done = subprocess.run(
        [*command, ROOT / f"{name}.ipynb", "out.ipynb"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    cells = json.loads((tmp_path / "out.ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert re.search(f"^{shown.pattern}$", printed, re.MULTILINE), printed
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_lint_of_model_notebooks_is_clean() -> None:
    notebooks = sorted(ROOT.glob("*.ipynb"))
    done = subprocess.run(
        [sys.executable, "-m", "tpunb", "lint", "--json", *notebooks],
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout) == [], done.stdout


@pytest.mark.parametrize("notebook", sorted(ROOT.glob("*.ipynb")), ids=lambda path: path.stem)
def test_model_notebook_is_saved_without_outputs_and_in_the_gallery(notebook: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    assert notebook.stem in SHOWS
    page = (ROOT.parents[1] / "docs" / "gallery.md").read_text()
    assert f"models/{notebook.name}" in page
