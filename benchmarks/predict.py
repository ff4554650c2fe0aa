"""Inference on all rehearsal ranks compared with one rank."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.commands import told_by
from benchmarks.table import Samples, table

SCRIPT = Path(__file__).with_name("inferring.py")


def measure(folder: Path, rounds: int, ranks: int, samples: int) -> str:
    """Compare `predict` on `ranks` ranks with a loop on one rank."""
    processors = len(os.sched_getaffinity(0))
    share = max(1, processors // ranks)
    shared, alone, whole = Samples(), Samples(), Samples()
    for _ in range(rounds):
        of_all = told_by(SCRIPT, folder, ranks, share, 2, samples)
        of_one = told_by(SCRIPT, folder, 1, processors, 2, samples)
        shared.add(of_all["together"])
        alone.add(of_all["alone"])
        whole.add(of_one["alone"])
    inference = [
        ("outputs of every sample", "seconds", "times as fast with predict"),
        (f"predict on {ranks} ranks", shared.text(2), ""),
        ("rank 0 of them, while the others wait", alone.text(2), alone.over(shared).text(2)),
        (
            f"a rank by itself, with {processors} processors",
            whole.text(2),
            whole.over(shared).text(2),
        ),
    ]
    return (
        f"Predict: {samples} samples through a network of 1.1 million weights, in batches of 32; "
        f"{ranks} rehearsal ranks on {processors} processors.\n\n{table(inference)}"
    )
