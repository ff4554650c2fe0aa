"""More of tests/scenarios/test_auto_stop.py, which takes longer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.drivers.kernel import Kernel
from tests.fakes.gcloud import FakeGcloud
from tests.machine.vms import PLACE
from tests.scenarios.test_auto_stop import SLOWLY, known, nb, place, shown, stops
from tpunb.runs.directory import list_runs


def test_data_download_and_upload_in_a_notebook(nb: Kernel, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket/a.csv").write_text("1,2\n")
    nb.run(f"where = 'file://{tmp_path}/bucket'", "parameters").good()
    ran = nb.run("%tpu_data {where} --to mine", "data").good()
    assert ran.stdout == f"file://{tmp_path}/bucket: 1 file, 4 B in mine\n"
    ran = nb.run("%tpu_data {where} --to mine", "data").good()
    assert "is already in mine (1 file, 4 B); nothing was downloaded" in ran.stdout
    ran = nb.run("%%tpu_train --cores 1\nprint(open('mine/a.csv').read())", "train").good()
    assert "1,2" in ran.stdout
    ran = nb.run("%tpu_data nowhere", "data")
    assert ran.traceback.startswith(
        "DataError: invalid source 'nowhere': expected a URL such as kaggle://"
    )
    ran = nb.run(f"%tpu_data mine --upload file://{tmp_path}/sent", "data").good()
    assert (tmp_path / "sent/a.csv").read_text() == "1,2\n"


def test_auto_stop_of_the_machine_after_a_run(nb: Kernel, known: FakeGcloud) -> None:
    nb.run(SLOWLY.format(9.0), "slowly").good()
    ran = nb.run(
        "%%tpu_train --cores 2 --stop-when-done --returns w\nimport time\ntime.sleep(1)\nw = 7",
        "train",
    ).good()
    assert "TPU VM my-tpu will be stopped; waiting: " in ran.screen()
    assert ". Keep it: %tpu_setup --keep-running (in a terminal: tpunb keep)" in ran.screen()
    assert nb.value("w") == 7
    assert "v6e-8 in us-central1, on demand: $21.60 an hour, as of 2026-11-21)" in ran.screen()
    run = list_runs(nb.folder / "runs")[-1]
    kept = json.loads(run.result.read_text())
    assert kept["cost"] == pytest.approx(21.6 * (kept["ended"] - kept["started"]) / 3600, abs=1e-4)
    assert nb.value("__import__('tpunb').last_run.cost") == kept["cost"]

    assert "TPU VM my-tpu will be stopped in 0:0" in shown(nb, "unless a cell runs. Keep it:")
    nb.run("import time; time.sleep(12)", "below").good()  # longer than the countdown
    assert stops(known) == 0
    assert "its disks are kept" in shown(nb, "TPU VM my-tpu is being stopped")
    assert known.nodes[PLACE]["state"] == "STOPPING"
    assert stops(known) == 1
