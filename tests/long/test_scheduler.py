"""More of tests/sweeps/test_scheduler.py, which takes longer."""

from __future__ import annotations

import signal
from pathlib import Path

import nbformat
import pytest

from tests.sweeps.test_scheduler import CELL, begin, lines, order, states, sweep, wait_until, write
from tpunb.utils import env_vars, processes


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.timeout(900)
def test_sweep_killed_at_three_points_resumes_without_loss_or_repeats(tmp_path: Path) -> None:
    write(tmp_path / "nb.ipynb", CELL)
    # Killed in the first trial's kernel, before its run began.
    process = begin(tmp_path)
    wait_until(lambda: states(tmp_path) == {0: "running"}, process)
    process.kill()
    process.communicate()
    # Killed in the middle of a run.
    hold = tmp_path / "hold-0.2"
    hold.touch()
    process = begin(tmp_path)
    wait_until(lambda: "begin 0.2" in lines(tmp_path), process)
    process.kill()
    process.communicate()
    assert "end 0.1" in lines(tmp_path)
    assert "end 0.2" not in lines(tmp_path)
    # Stopped by Ctrl-C, with time to save.
    process = begin(tmp_path)
    wait_until(lambda: lines(tmp_path).count("begin 0.2") == 2, process)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=200)[0]
    assert "stopped; run it again to continue" in said, said
    assert states(tmp_path)[1] == "waiting"
    hold.unlink()
    # The last call runs to the end.
    process = begin(tmp_path)
    said = process.communicate(timeout=400)[0]
    assert process.returncode == 0, said
    assert "3 trials: 1 complete, 2 waiting" in said
    assert "3 trials: 3 complete · best loss 0 in trial 1" in said
    ends = [line for line in lines(tmp_path) if line.startswith("end")]
    assert sorted(ends) == ["end 0.1", "end 0.2", "end 0.3"]
    (sweep,) = tmp_path.glob("runs/sweeps/nb-*")
    for number in range(3):
        cells = nbformat.read(sweep / "trials" / f"000{number}.ipynb", 4).cells
        assert any("injected-parameters" in cell.metadata.get("tags", ()) for cell in cells)
    left = processes.with_variables([f"{env_vars.SWEEP}={sweep}#0"])
    assert not left
    before = lines(tmp_path)
    again = begin(tmp_path)
    assert "3 complete" in again.communicate(timeout=100)[0]
    assert lines(tmp_path) == before  # nothing ran
