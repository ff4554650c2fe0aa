"""One notebook, unchanged, sent to kinds of places: the same numbers, the same form of result.

Its ranks train together, with torch_xla on rehearsal cores: what stands in for a place has no chip.
The table in docs/places.md is this.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbformat import v4

from tests.drivers.nodes import until
from tests.drivers.places import tpunb, write_places
from tests.drivers.pods import ReachedPod, reached_pod
from tests.drivers.trainings import PRELUDE
from tests.drivers.trainings import TRAIN as STEPS
from tests.fakes.hosts import why_refused
from tpunb.runs.directory import RunDir, list_runs
from tpunb.runs.result import RunResult
from tpunb.runs.returns import collect_returns
from tpunb.runs.spec import RunState

pytestmark = pytest.mark.timeout(900)

TRAIN = (
    f"%%tpu_train --returns weights{STEPS}"
    + """\
weights = model.weight.detach().cpu()[0].tolist()
print("trained", flush=True)
"""
)
PLACES: Mapping[str, tuple[int, int]] = {
    "ssh": (2, 2),
    "gcloud": (2, 2),
}
"""Hosts and ranks, by kind of place."""


class Everywhere:
    """A project with a place of each kind, and all stand-ins."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        made = [folder / name for name in ("pod", "project")]
        for each in made:
            each.mkdir()
        self.pod: ReachedPod = stack.enter_context(reached_pod(2, made[0]))
        self.pod.set_cloud(
            {"tpu": {"mine": {"zone": "z-a", "state": "READY", "hosts": ["h0", "h1"]}}}
        )
        self.folder = made[1]
        self.env = {**os.environ, **self.pod.environment(), "HOME": str(folder)}
        cells = [v4.new_code_cell(PRELUDE), v4.new_code_cell(TRAIN)]
        nbformat.write(v4.new_notebook(cells=cells), str(self.folder / "nb.ipynb"))
        hosts = {"python": sys.executable, "cores": 1}
        write_places(
            self.folder,
            ssh={"kind": "ssh", "hosts": self.pod.names, **hosts},
            gcloud={"kind": "gcloud-tpu", "name": "mine", "zone": "z-a", **hosts},
        )

    def submit(self, place: str) -> str:
        done = tpunb(self.folder, self.env, "submit", "nb.ipynb", "--on", place)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def everywhere(
    starts_processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Everywhere]:
    if refused := why_refused():
        pytest.skip(refused)
    with ExitStack() as stack:
        yield Everywhere(tmp_path_factory.mktemp("everywhere"), stack)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What the cells compute in one process."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 3), torch.randn(64, 1)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "weights": model.weight[0].tolist()}


@pytest.mark.parametrize("place", PLACES)
def test_same_notebook_gives_the_same_numbers_at_every_place(
    everywhere: Everywhere, expected: dict[str, Any], place: str
) -> None:
    said = everywhere.submit(place)
    run = list_runs(everywhere.folder / "runs")[-1]
    result = run.read_result()
    assert result is not None, said
    ranks = PLACES[place][1]
    assert (len(result.hosts), result.world_size) == PLACES[place]
    assert result.price is None
    assert (result.state, result.place) == (RunState.SUCCEEDED, place)
    by_step = result.metrics().groupby("step")["loss"]
    assert by_step.count().tolist() == [ranks] * 5
    assert by_step.mean().tolist() == pytest.approx(expected["loss"], abs=1e-6)
    returned = collect_returns(result, run.read_spec()).returns
    assert returned == {"weights": pytest.approx(expected["weights"], abs=1e-6)}
    assert run.log.read_text().count("] trained") == ranks
    assert forms_of(run, result) == FORM
    until(lambda: not everywhere.pod.left())


FORM = {
    "attempts", "env.json", "events.jsonl", "metrics.jsonl", "notebook.json", "place.json",
    "result.json", "returns", "run.log", "script.py", "spec.json",
}  # fmt: skip
"""What every such run has in its folder."""


def forms_of(run: RunDir, result: RunResult) -> set[str]:
    """Of that, what this one has."""
    assert RunResult.from_json(result.to_json(), run.path) == result
    return {path.name for path in run.path.iterdir()} & FORM
