"""Notebooks that do not import tpunb, as scripts: in an empty folder, without tpunb."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from tpunb import cli

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
LONG = "it takes long, and differs from the others in nothing that a script does"
NOT_RUN = {
    "02_transformers": LONG,
    "05_timm": LONG,
    "06_torchmetrics": LONG,
    "04_fastai": "fastai never ends a step: without tpunb, on one device, each step takes longer",
}
"""Notebooks whose script is not run here."""
SHORTER = {"(train, (6, 32)": "(train, (1, 32)", "for epoch in range(4)": "for epoch in range(1)"}
"""Whether it runs to its end does not depend on how long it trains."""
ALL = {
    path.stem: path
    for path in sorted(NOTEBOOKS.rglob("*.ipynb"))
    if path.stem == "01_spawn_unchanged"
    or (path.parent.name == "frameworks" and path.stem != "03_lightning")
}
# Without a TPU, accelerate's launcher starts processes of gloo whose XLA devices never meet.
ALONE = [
    (name, how)
    for name in ALL
    for how in ("python", "torchrun")
    if name not in NOT_RUN and (name, how) != ("01_accelerate", "python")
]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")


@pytest.fixture(scope="module")
def python(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has all that this one has, but for tpunb."""
    folder = tmp_path_factory.mktemp("without-tpunb")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # The .pth files there, one of which is tpunb's, are not read.
    (packages / "all.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin" / "python"


def run(
    python: Path, folder: Path, words: Sequence[str | Path]
) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PJRT_DEVICE")}
    return subprocess.run(
        [python, *words],
        cwd=folder,
        env={**inherited, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        check=False,
    )


def exported(notebook: Path, folder: Path) -> tuple[Path, Path]:
    """The script of a notebook, and an empty folder."""
    script, empty = folder / "script.py", folder / "empty"
    assert cli.main(["convert", str(notebook), "-o", str(script)]) == 0
    text = script.read_text()
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    script.write_text(text)
    empty.mkdir()
    return script, empty


def test_exported_script_environment_has_no_tpunb(python: Path, tmp_path: Path) -> None:
    done = run(python, tmp_path, ["-c", "import torch_xla, nbformat, tpunb"])
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'tpunb'"


@pytest.mark.parametrize(("name", "how"), ALONE)
def test_exported_script_runs_without_tpunb(
    name: str, how: str, python: Path, tmp_path: Path
) -> None:
    script, empty = exported(ALL[name], tmp_path)
    done = run(python, empty, [*((*TORCHRUN, "--standalone") if how == "torchrun" else ()), script])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    if how == "torchrun":
        assert "each of 2 processes trains by itself" in done.stderr


def test_exported_script_exceptions_name_existing_notebooks() -> None:
    assert NOT_RUN.keys() <= ALL.keys()
    every = "".join(path.read_text() for path in ALL.values())
    assert [long for long in SHORTER if long not in every] == []
