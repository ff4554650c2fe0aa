"""More of tests/worker/test_rich_progress.py, which takes longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker.test_rich_progress import run

pytestmark = pytest.mark.usefixtures("starts_processes")


def test_rich_progress_bar_of_lightning(tmp_path: Path) -> None:
    code = """
import torch, lightning
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
seen = []
class Look(Callback):
    def on_train_batch_end(self, *args):
        seen.append(told())
lightning.Trainer(
    max_epochs=2, limit_train_batches=4, limit_val_batches=0, logger=False, accelerator="cpu",
    enable_checkpointing=False, enable_model_summary=False, default_root_dir=str(file.parent),
    callbacks=[RichProgressBar(refresh_rate=1), Look()],
).fit(BoringModel())
print()
print(json.dumps(seen))
"""
    seen = run(tmp_path, code, "0")
    [last] = seen[-1]
    assert last["name"].startswith("Epoch 1")
    assert last["total"] == 4
    assert last["done"] >= 3
