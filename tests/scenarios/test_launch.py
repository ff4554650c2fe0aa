"""`tpunb.launch` in real kernels: in a loop, with errors, interrupts, other cells around it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from textwrap import dedent

import pytest

from tests.drivers.kernel import Kernel, Ran, kernel
from tpunb.runs.directory import RunDir, list_runs


@pytest.fixture(scope="module")
def nb(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A notebook in JupyterLab that never loads the extension, with cells that tests edit."""
    with kernel(tmp_path_factory.mktemp("lab")) as made:
        made.run("import os, time, torch, tpunb\nscale = 2", "first").good()
        for name in ("above", "sweep", "cell"):
            made.run("pass", name).good()
        yield made


def cell(nb: Kernel, source: str, id: str = "cell") -> Ran:
    return nb.run(dedent(source).strip("\n"), id)


def last_run(nb: Kernel) -> RunDir:
    return list_runs(nb.folder / "runs")[-1]


def train_cell(nb: Kernel) -> str:
    """What the ranks of the last run ran."""
    run = last_run(nb)
    [block] = [block for block in run.read_spec().blocks if block.role == "train"]
    lines = run.script.read_text(encoding="utf-8").split("\n")
    return "\n".join(lines[block.first - 1 : block.last]).strip()


def test_launch_in_a_loop_in_the_cell_that_defines_the_function(nb: Kernel) -> None:
    ran = cell(
        nb,
        """
        def train(rate):
            print("rank", os.environ["RANK"], "rate", rate)
            return rate * scale

        found = {}
        for rate in (0.5, 0.25):
            found[rate] = tpunb.launch(train, args=(rate,), cores=2).returns["value"]
        found
        """,
    ).good()
    assert ran.shown == "{0.5: 1.0, 0.25: 0.5}"
    assert sorted(re.findall(r"\[(\d)\] rank \1 rate (\S+)", ran.stdout)) == [
        *(("0", "0.25"), ("0", "0.5"), ("1", "0.25"), ("1", "0.5"))
    ]
    first, second = (line for line in ran.status.splitlines() if line[:9] == "succeeded")
    assert re.search(r"s · runs/\S+-train$", first), "one card, with a line for the run before"
    assert " · ended " in second
    assert last_run(nb).id.endswith("-train")
    assert train_cell(nb) == "value = train(0.25)"
    assert nb.value("'value' in globals()") is False
    assert nb.value("tpunb.last_run.returns") == {"value": 0.5}


def test_what_on_log_raises_stops_the_run_and_keyword_arguments_are_passed(nb: Kernel) -> None:
    ran = cell(
        nb,
        """
        class Pruned(Exception):
            pass

        def train(rate, *, steps):
            for step in range(steps):
                tpunb.log(step, loss=rate * step)
                time.sleep(0.02)
            return rate

        def report(values, step):
            seen.append((step, values["loss"]))
            if values["loss"] >= 2:
                raise Pruned

        seen = []
        for steps in (2, 100_000):
            try:
                print(tpunb.launch(train, (1.0,), {"steps": steps}, on_log=report, cores=1).value)
            except Pruned:
                print("pruned", tpunb.last_run.state)
        """,
    ).good()
    assert "1.0\n" in ran.stdout
    assert "pruned interrupted\n" in ran.stdout
    assert nb.value("seen[:5]") == [(0, 0.0), (1, 1.0), (0, 0.0), (1, 1.0), (2, 2.0)]
    assert len(ran.statuses()) == 1


def test_launch_with_tensor_and_object_arguments(nb: Kernel) -> None:
    cell(
        nb,
        """
        class Config:
            steps = 3
        def step(model, optimizer, config, scale=scale):
            shared = optimizer.param_groups[0]["params"][0] is model.weight
            return model.weight.sum() * config.steps * scale, shared
        """,
        "above",
    ).good()
    cell(
        nb,
        """
        model = torch.nn.Linear(2, 1, bias=False).requires_grad_(False)
        model.weight[:] = torch.ones(1, 2)
        config = Config()
        config.steps = 5
        args = model, torch.optim.SGD(model.parameters(), lr=1), config
        value, shared = tpunb.launch(step, args, cores=2, name="by-file").returns["value"]
        """,
    ).good()
    assert nb.value("value.item(), shared") == (20.0, True)
    assert train_cell(nb).count("_tpunb_arguments[") == 3
    assert last_run(nb).id.endswith("-by-file")


def test_failure_names_the_cells_of_the_function_and_of_the_call(nb: Kernel) -> None:
    defined = cell(nb, "def divide(x):\n    y = 1\n    return y / x", "above").good()
    failed = cell(nb, "ok = 1\n\n%time tpunb.launch(divide, args=(0,), cores=2)")
    here, there = failed.number, defined.number
    assert re.search(rf"rank \d failed in cell \[{there}\], line 3: ZeroDiv", failed.red_line)
    assert "was not returned" not in failed.screen()
    traceback = nb.value("tpunb.last_run.failure.traceback")
    assert f"cell [{here}], line 3, in <module>\n    value = divide(0)\n" in traceback
    assert f"cell [{there}], line 3, in divide\n    return y / x\n" in traceback
    kept = cell(nb, "tpunb.launch(divide, (0,), cores=1, raises=False).state").good()
    assert "failed" in kept.shown


def test_interrupt_stops_the_launch_and_the_loop(nb: Kernel) -> None:
    ran = nb.send(
        dedent(
            """
            def wait(number):
                print("waiting", number, flush=True)
                time.sleep(600)

            for number in (1, 2):
                try:
                    tpunb.launch(wait, args=(number,), cores=2, raises=False)
                except Exception:
                    pass
            """
        ).strip(),
        "cell",
    )
    nb.until(ran, "waiting 1")
    nb.interrupt()
    nb.wait(ran)
    assert ran.error is not None
    assert ran.error["ename"] == "LaunchInterrupt"
    assert "interrupted; run" in ran.traceback
    assert "waiting 2" not in ran.stdout
    assert nb.value("tpunb.last_run.state") == "interrupted"
    assert not nb.working()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("tpunb.launch(lambda: 1)", "HandoffError: tpunb.launch: ranks cannot find the lambda"),
        ("tpunb.launch(len, args=([print, lambda: 1],))", "the argument `obj`, a list, cannot be"),
        ("tpunb.launch(late)\ndef late(): pass", "NameError"),
    ],
)
def test_launch_that_is_refused_starts_nothing(nb: Kernel, source: str, words: str) -> None:
    before = os.listdir(nb.folder / "runs")
    assert words in cell(nb, source).traceback
    assert os.listdir(nb.folder / "runs") == before


def test_launch_in_a_thread_is_refused(nb: Kernel) -> None:
    ran = cell(
        nb,
        """
        import threading
        refused = []
        def in_thread():
            try:
                tpunb.launch(len, ("x",))
            except Exception as error:
                refused.append(str(error))
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
        """,
    ).good()
    assert "was called in a thread" in nb.value("refused[0]")
    assert ran.statuses() == []


def test_launch_cells_are_left_out_of_other_runs(nb: Kernel) -> None:
    cell(
        nb,
        """
        def one(x):
            return x
        def sweep(*xs):
            return [tpunb.launch(one, (x,), cores=1, ranks="none").returns["value"] for x in xs]
        """,
        "above",
    ).good()
    cell(nb, "base = 3\nfound = sweep(1, 2)", "sweep").good()
    assert nb.value("found") == [1, 2]
    ran = cell(nb, "%%tpu_train --cores 1\nprint('base', base, 'found', found)").good()
    assert "[0] base 3 found [1, 2]" in ran.stdout
    assert len(ran.statuses()) == 1
    cell(nb, "pass", "sweep").good()


def test_launch_results_are_available_in_later_runs(nb: Kernel) -> None:
    cell(
        nb,
        """
        def pretrain(rate):
            return {"w": torch.full((2,), rate)}
        results = []
        first = tpunb.launch(pretrain, (0.5,), cores=1)
        for rate in (1.0, 2.0):
            results.append(tpunb.launch(pretrain, (rate,), cores=1))
        weights = tpunb.launch(pretrain, (4.0,), cores=1).value
        """,
        "above",
    ).good()
    cell(nb, "w = first.returns['value']['w']\nprint(first)", "sweep").good()
    ran = cell(
        nb,
        """
        def finetune():
            sums = [result.value["w"].sum().item() for result in results]
            return w.tolist(), sums, weights["w"].tolist(), rate
        again = tpunb.launch(finetune, cores=2)
        print(again.value)
        """,
    ).good()
    assert "([0.5, 0.5], [2.0, 4.0], [4.0, 4.0], 2.0)" in ran.stdout
    rates = nb.value("tpunb.runs().query('name == \"pretrain\"')['params.rate'].tolist()")
    assert rates == [4.0, 2.0, 1.0, 0.5]
    cell(nb, "pass", "above").good()
    cell(nb, "pass", "sweep").good()
