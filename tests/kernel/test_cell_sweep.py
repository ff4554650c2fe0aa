"""`%%tpu_train --grid` in a real kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.drivers.kernel import Kernel, Ran, kernel
from tpunb.runs.directory import list_runs

pytestmark = pytest.mark.usefixtures("lent")

TRAIN = """%%tpu_train --cores 1 --grid rate=0.1,0.2 --grid seed=0..1 --out study
import tpunb
with open("ran.txt", "a") as file:
    print(rate, seed, scaled, file=file)
for step in range(3):
    tpunb.log(step, loss=(rate - 0.2) ** 2 + seed)
if rate == 0.1 and seed:
    raise ValueError("no good")
"""


@pytest.fixture(scope="module")
def nb(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("lab")) as made:
        made.run("%load_ext tpunb\nrate, seed = 0.5, 7", "load").good()
        made.run("with open('prelude.txt', 'a') as file:\n    print('ran', file=file)", "p").good()
        made.run("scaled = rate * 10", "scaled").good()
        yield made


def shown(ran: Ran) -> str:
    return json.dumps([ran.displays, ran.texts, ran.error], ensure_ascii=False)


def lines(nb: Kernel, name: str) -> list[str]:
    return (nb.folder / name).read_text().splitlines()


def test_grid_option_runs_trials_and_resumes_failed_ones(nb: Kernel) -> None:
    ran = nb.run(TRAIN, "train").good()
    assert "4 trials: 3 complete, 1 failed · best loss 0 in trial 2" in shown(ran)
    # Values computed from a parameter match it; cells that use no parameter ran once.
    assert lines(nb, "ran.txt") == ["0.1 0 1.0", "0.1 1 1.0", "0.2 0 2.0", "0.2 1 2.0"]
    assert len(lines(nb, "prelude.txt")) == 2  # once in the kernel, once for all trials
    assert all(run.read_spec().trial for run in list_runs(nb.folder / "runs"))
    told = nb.run(
        "# tpu: skip\nprint(study.best.parameters, study.best.value, rate, seed)", "best"
    ).good()
    # The kernel's own values are unchanged.
    assert told.stdout == "{'rate': 0.2, 'seed': 0} 0.0 0.5 7\n"
    errors = nb.run("# tpu: skip\nprint(*study.table()['error'].dropna())", "table").good()
    assert "ValueError: no good" in errors.stdout
    nb.run(TRAIN, "train").good()
    assert len(lines(nb, "ran.txt")) == 5  # only the failed trial runs again


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--grid rte=1", "no cell above assigns rte"),
        ("--grid rate=fast", "the notebook's default is 0.5"),
        ("--grid rate=1 --detach", "--grid cannot be combined with --detach"),
        ("--grid rate=1 --bg", "--grid cannot be combined with --bg"),
    ],
)
def test_sweep_options_that_are_refused(nb: Kernel, options: str, said: str) -> None:
    ran = nb.run(f"%%tpu_train {options}\npass", "refused")
    assert said in shown(ran)
