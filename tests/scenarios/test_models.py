"""The gallery's notebooks: each trains at small size, and prints the figures that it claims."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

# Each is a kernel with several trainings.
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("lent")]

ROOT = Path(__file__).parents[2] / "notebooks" / "models"


class Shown(NamedTuple):
    parameters: str
    """As for papermill: `name=value`, what makes it smaller than the notebook itself."""
    pattern: str
    """What its last cell prints: learned, and the same numbers as one process."""


SHOWS = {
    "big_batch_gan": Shown(
        "steps=150",
        r"GAN on 2 rehearsal cores: [89]\d\.\d% of the digits read as asked, "
        r"diversity (0\.[5-9]|1\.0)\d, Fréchet distance [0-3]\.\d\d where real ones have 0\.\d\d; "
        r"losses within \de-0[5-9] of plain PyTorch; "
        r"1 program for training, 1 for evaluation; [\d,]+ images a second",
    ),
    "dlrm": Shown(
        "samples=20000 tables=[2000,500,100,10]",
        r"DLRM on 2 rehearsal cores: AUC 0\.8[0-6]\d, with the hidden weights 0\.88\d; "
        r"losses within \de-0[5-9] of plain PyTorch; "
        r"after the first step 1 program for training, 1 for evaluation; [\d,]+ samples a second",
    ),
    "llm_decoder_spmd": Shown(
        "layers=1 window=64 width=64 steps=100 batch_size=6",
        r"Llama on 2 rehearsal cores \(SPMD\): [34]\d\.\d% of the next bytes right, "
        r"[23]\.\d+ bits for each; "
        r"losses within \de-0[5-9] of plain PyTorch; "
        r"after the first step 1 program for training, 1 for evaluation; [\d,]+ bytes a second",
    ),
    "segmentation_unet": Shown(
        "pictures=300 features=[8,16] size=20",
        r"U-Net on 2 rehearsal cores: mean IoU 0\.[5-8]\d+, of the worst class \(.*\) 0\.\d+, "
        r"9\d\.\d% of the pixels right; losses within \de-0[5-9] of plain PyTorch; "
        r"1 program for training, 1 for evaluation; [\d,]+ pictures a second",
    ),
    "translation_transformer": Shown(
        "texts=110 layers=1 width=64 longest=10 epochs=12 lr=6e-3",
        r"Transformer on 2 rehearsal cores: [6-9]\d\.\d% of the tokens right, .*; "
        r"losses within \de-0[5-9] of plain PyTorch; "
        r"after the first step 1 program for training, 1 for evaluation; [\d,]+ texts a second",
    ),
    "bert_glue": Shown(
        "layers=1 longest=24 lengths=1 epochs=4 lr=4e-3",
        r"BERT on 2 rehearsal cores: [678]\d\.\d% of 200 sentences right; "
        r"losses within \de-0[5-9] of plain PyTorch; "
        r"after the first step 1 program for training, 1 for evaluation; [\d,]+ sentences a second",
    ),
    "cnn_first_steps": Shown(
        "epochs=4 width=8",
        r"accuracy 0\.9\d+ after 4 epochs on 2 rehearsal cores, 0\.9\d+ after 2 more; "
        r"losses within \de-0[5-9] of plain PyTorch; "
        r"1 program for training, 1 for evaluation; [\d,]+ images a second",
    ),
    "resnet50_images": Shown(
        "model_name=test_resnet epochs=2",
        r"test_resnet: accuracy 0\.9\d+ after 2 epochs on 2 rehearsal cores; "
        r"the first loss within \de-0[5-9] of plain PyTorch; "
        r"1 program for training, 1 for evaluation; [\d,]+ images a second of 0\.024 GFLOP",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(900)  # a kernel and some runs, on a machine that may do much else
@pytest.mark.parametrize("name", SHOWS)
def test_a_model_trains_to_what_its_notebook_claims(name: str, tmp_path: Path) -> None:
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


def test_lint_finds_nothing_in_them() -> None:
    notebooks = sorted(ROOT.glob("*.ipynb"))
    done = subprocess.run(
        [sys.executable, "-m", "tpunb", "lint", "--json", *notebooks],
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout) == [], done.stdout


@pytest.mark.parametrize("notebook", sorted(ROOT.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_saved_without_outputs_and_shown(notebook: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    assert notebook.stem in SHOWS
    page = (ROOT.parents[1] / "docs" / "gallery.md").read_text()
    assert f"models/{notebook.name}" in page
