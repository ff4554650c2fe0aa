"""More of tests/scenarios/test_launch.py, which takes longer."""

from __future__ import annotations

from tests.drivers.kernel import Kernel
from tests.scenarios.test_launch import cell, nb


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
    rates = nb.value("tpunb.runs()['params.rate'].dropna().tolist()")
    assert rates[:5] == [2.0, 4.0, 2.0, 1.0, 0.5]  # the newest one reads the notebook's own
    cell(nb, "pass", "above").good()
    cell(nb, "pass", "sweep").good()
