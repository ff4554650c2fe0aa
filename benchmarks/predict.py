"""Inference on all rehearsal ranks beside one, and what `shard` costs a step."""

from __future__ import annotations

import json
import os
from pathlib import Path

from benchmarks.commands import run, torchrun
from benchmarks.table import Samples, met, table

SCRIPT = Path(__file__).with_name("inferring.py")


def measure(folder: Path, rounds: int, ranks: int, samples: int) -> str:
    """`predict` on `ranks` ranks beside one rank, and steps with `shard` beside bare code."""
    processors = len(os.sched_getaffinity(0))
    share = max(1, processors // ranks)
    shared, alone, whole = Samples(), Samples(), Samples()
    steps: dict[str, Samples] = {}
    for _ in range(rounds):
        of_all = _told(folder, ranks, share, "predict", 2, samples)
        of_one = _told(folder, 1, processors, "predict", 2, samples)
        shared.add(of_all["together"])
        alone.add(of_all["alone"])
        whole.add(of_one["alone"])
        for name, values in _told(folder, 1, processors, "steps", 8, samples).items():
            steps.setdefault(name, Samples()).add(values)
    inference = [
        ("outputs of every sample", "seconds", "times as fast with predict"),
        (f"predict on {ranks} ranks", shared.text(2), ""),
        ("rank 0 of them, while the others wait", alone.text(2), alone.over(shared).text(2)),
        (f"a rank by itself, with {processors} processors", whole.text(2),
         whole.over(shared).text(2)),
    ]  # fmt: skip
    overhead = [("a step", "processor ms", "ratio", "goal ≤ 1.02")]
    for label, bare, name, with_shard in (
        ("without a mask", "bare", 'shard, rest="drop"', "dropped"),
        ("with a mask", "bare masked", "shard and masked_loss", "masked"),
    ):
        ratio = steps[with_shard].over(steps[bare])
        overhead.append((f"bare, {label}", _ms(steps[bare]), "", ""))
        overhead.append((name, _ms(steps[with_shard]), ratio.text(3), met(ratio, most=1.02)))
    return (
        f"Predict: {samples} samples through a network of 1.1 million weights, in batches of 32; "
        f"{ranks} rehearsal ranks on {processors} processors.\n\n{table(inference)}\n\n"
        "Shard: a step of training in one rank, beside a DataLoader with a DistributedSampler;\n"
        "processor time of all its threads.\n\n" + table(overhead)
    )


def _told(
    folder: Path, ranks: int, threads: int, what: str, rounds: int, samples: int
) -> dict[str, list[float]]:
    """What one start of the script measured, without its rounds."""
    command = [*torchrun(ranks, str(SCRIPT)), what, str(rounds), str(samples)]
    env = {"NPROC": str(threads), "OMP_NUM_THREADS": str(threads)}
    text = run(command, folder, env=env).text
    (line,) = [line for line in text.splitlines() if line.startswith("{")]
    found: dict[str, list[list[float]]] = json.loads(line)
    return {name: [value for one in times for value in one] for name, times in found.items()}


def _ms(samples: Samples) -> str:
    return Samples([[1000 * value for value in one] for one in samples.rounds]).text(2)
