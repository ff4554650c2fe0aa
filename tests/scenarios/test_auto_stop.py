"""`--stop-when-done` as a person meets it: a notebook on a TPU VM, and a gcloud for tests.

The machine's chips are made up, so runs are rehearsals: PJRT_DEVICE=CPU asks for them.
"""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.kernel import Kernel, kernel, until
from tests.fakes.gcloud import FakeGcloud
from tests.machine.vms import PLACE, gcloud, path_with, tpu_vm
from tpunb import cli
from tpunb.machine import auto_stop
from tpunb.runs.directory import list_runs

SLOWLY = "import tpunb.machine.auto_stop as s; s.COUNTDOWN = {}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a home, and the stand-in in front of any other gcloud, for all processes."""
    folder = tmp_path_factory.mktemp("money")
    (folder / "home").mkdir()
    (folder / "lab").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path_with(gcloud(folder / "bin")))
        patch.setenv("HOME", str(folder / "home"))
        patch.delenv("XDG_CACHE_HOME", raising=False)
        yield folder


@pytest.fixture(scope="module")
def nb(starts_processes: None, place: Path) -> Iterator[Kernel]:
    with tpu_vm(place / "root") as machine:
        env = {**machine.env, "HOME": os.environ["HOME"], "PJRT_DEVICE": "CPU"}
        with kernel(place / "lab", **env) as made:
            patient = "from tpunb.machine import metadata; metadata.PATIENCE = 20.0"
            made.run(patient, "patient").good()
            made.run("%load_ext tpunb", "load").good()
            yield made
            auto_stop.keep_running()
        until(lambda: not _watchers(place), "the end of the watchers")


@pytest.fixture
def known(place: Path) -> FakeGcloud:
    """What gcloud knows: the machine as it is, and no call yet."""
    made = FakeGcloud(place / "bin")
    made.put(PLACE, state="READY", schedulingConfig={})
    (place / "bin/calls.jsonl").unlink(missing_ok=True)
    return made


def _watchers(place: Path) -> list[str]:
    home = f"HOME={place / 'home'}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or home not in (entry / "environ").read_bytes():
                continue
            if b"tpunb: stop when done" in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:  # it has just ended
            continue
    return found


def shown(nb: Kernel, words: str) -> str:
    """Wait until an output somewhere in the notebook has these words."""

    def look() -> str:
        try:
            message = nb.client.get_iopub_msg(timeout=1.0)
        except queue.Empty:
            return ""
        text = str(message["content"].get("data", {}).get("text/plain", ""))
        return text if words in text else ""

    return str(until(look, words))


def stops(known: FakeGcloud) -> int:
    return sum(call[3] == "stop" for call in known.calls)


def test_auto_stop_is_cancelled_or_refused(
    nb: Kernel, known: FakeGcloud, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = nb.run("%tpu_setup --no-warm --idle 5m", "setup")
    assert "%tpu_setup --idle needs --stop-when-done" in wrong.stderr
    known.put(PLACE, schedulingConfig={"spot": True})
    before = len(list_runs(nb.folder / "runs"))
    ran = nb.run("%%tpu_train --stop-when-done\nprint('ran')", "train")
    assert "SetupError: --stop-when-done cannot stop this machine: this is a spot" in ran.traceback
    assert "will be stopped" not in ran.screen()
    assert len(list_runs(nb.folder / "runs")) == before
    known.put(PLACE, schedulingConfig={})

    nb.run(SLOWLY.format(600.0), "slowly").good()
    nb.run("%tpu_setup --no-warm --stop-when-done --idle 1m", "setup").good()
    assert "TPU VM my-tpu will be stopped in " in shown(nb, "will be stopped in ")
    assert cli.main(["keep"]) == 0  # from a terminal of the same user
    assert capsys.readouterr().out == "this machine is kept running\n"
    assert shown(nb, "is kept running") == "TPU VM my-tpu is kept running"
    ran = nb.run("%tpu_setup --no-warm --keep-running", "setup").good()
    assert "no shutdown is scheduled" in ran.stdout
    assert stops(known) == 0


def test_data_download_and_upload_in_a_notebook(nb: Kernel, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket/a.csv").write_text("1,2\n")
    nb.run(f"where = 'file://{tmp_path}/bucket'", "parameters").good()
    ran = nb.run("%tpu_data {where} --to mine", "data").good()
    assert ran.stdout == f"file://{tmp_path}/bucket is in mine (1 file, 4 B); downloaded\n"
    ran = nb.run("%tpu_data {where} --to mine", "data").good()
    assert "is in mine (1 file, 4 B); nothing was downloaded" in ran.stdout
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
