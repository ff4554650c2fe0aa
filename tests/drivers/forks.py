"""`python -m tests.drivers.forks 1000`: forks a process that computes in threads, and counts.

The parent uses torch, numpy, scikit-learn, pandas and pyarrow with all processors before each
batch of forks; each child uses two of them, or XLA, on as many threads as its number says.
Writes one line of JSON: how many children ended in which way.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import torch
import torch_xla
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.ensemble import HistGradientBoostingClassifier

from tpunb.worker import fork_safety

BATCH = 4
PATIENCE = 120.0
"""Seconds in which a child must end; it takes less than one."""

X, Y = load_digits(n_class=3, return_X_y=True)
FEATURES = torch.rand(300, 300)
LAYER = torch.nn.Conv2d(3, 8, 3)
TABLE = pd.DataFrame({"number": range(20_000), "word": ["x", "y"] * 10_000})
LINES = b"a,b\n" + b"1,2\n" * 50_000


def with_torch() -> None:
    with torch.no_grad():
        LAYER(torch.rand(2, 3, 40, 40))
    assert (FEATURES @ FEATURES).sum() > 0


def with_numpy() -> None:
    square = np.random.rand(300, 300)
    assert np.linalg.svd((square @ square)[:30])[1][0] > 0


def with_sklearn() -> None:
    HistGradientBoostingClassifier(max_iter=1, max_leaf_nodes=4).fit(X[:99], Y[:99])
    KMeans(2, n_init=1).fit(X[:99])


def with_pandas() -> None:
    file = io.BytesIO()
    TABLE.to_parquet(file)
    assert len(pd.read_parquet(file).groupby("word").number.mean()) == 2


def with_pyarrow() -> None:
    table = pa.csv.read_csv(io.BytesIO(LINES))
    assert pa.compute.sum(table["a"]).as_py() == 50_000


def with_xla() -> None:
    x = torch.ones(30, 30, device=torch_xla.device(), requires_grad=True)
    (x @ x).sum().backward()
    assert x.grad is not None
    assert x.grad.cpu()[0, 0] == 60


KINDS: list[Callable[[], None]] = [with_torch, with_numpy, with_sklearn, with_pandas, with_pyarrow]


def child(number: int) -> None:
    chosen = random.Random(number)
    fork_safety.limit_threads(chosen.choice([1, 2]))
    for kind in chosen.sample(KINDS, 2):
        kind()
    if number % 10 == 0:
        with_xla()


def end(pid: int) -> str:
    """How a child ended: "exit 0", or "hung" after it was killed."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return f"exit {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"


def main(forks: int) -> None:
    ends: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    took: list[float] = []
    check = fork_safety.ForkSafetyCheck()
    for first in range(0, forks, BATCH):
        for kind in random.Random(first).sample(KINDS, 3):
            kind()
        if problem := check.problem():
            refused[problem] += 1
        pids = []
        for number in range(first, first + BATCH):
            with_torch()  # so that each fork finds a pool
            began = time.perf_counter()
            pid = fork_safety.fork()
            if pid == 0:
                code = 1
                try:
                    child(number)
                    code = 0
                finally:
                    os._exit(code)
            took.append(time.perf_counter() - began)
            pids.append(pid)
        ends.update(map(end, pids))
        if ends["hung"] >= BATCH:
            break
    took.sort()
    milliseconds = [round(1000 * took[len(took) * part // 100], 1) for part in (50, 99)]
    print(json.dumps({"ends": ends, "refused": refused, "fork_ms": milliseconds}), flush=True)
    os._exit(0)  # a normal exit of the interpreter takes seconds


if __name__ == "__main__":
    main(int(sys.argv[1]))
