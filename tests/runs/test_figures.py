"""Figures of the metrics of runs."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter

from tpunb.errors import MissingPackageError
from tpunb.runs.result import RunResult


def result(folder: Path, name: str, *rows: dict[str, object]) -> RunResult:
    made = folder / name
    made.mkdir()
    lines = [
        json.dumps({"rank": 0, "attempt": 0, "time": 5.0 + n, **row}) for n, row in enumerate(rows)
    ]
    (made / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return RunResult("succeeded", name, 2, "CPU", 5.0, 9.0, made)


def test_a_panel_for_each_metric_and_a_line_for_each_run(tmp_path: Path) -> None:
    one = result(
        tmp_path,
        "one",
        {"step": 0, "loss": 2.0},
        {"step": 0, "rank": 1, "loss": 4.0},
        {"step": 1, "loss": 1.0, "lr": 0.1},
        {"step": 2, "loss": 0.5, "a": 1.0, "b": 1.0},
        {"step": 1, "rank": 1, "loss": 1.0},
        {"step": 2, "rank": 1, "loss": 0.5},
    )
    other = result(tmp_path, "other", {"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5})
    figure = one.plot(other)
    assert [axis.get_ylabel() for axis in figure.axes] == ["loss", "lr", "a", "b"]
    loss = figure.axes[0]
    assert loss.get_xlabel() == "step"
    lines = [np.asarray(line.get_ydata()).tolist() for line in loss.lines]
    assert lines == [[3.0, 1.0, 0.5], [1.0, 0.5]]
    legend = figure.axes[2].get_legend()  # at the right end of the row
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["one", "other"]
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert len(file.getvalue()) > 5_000


def test_a_figure_is_a_cells_picture_and_pyplot_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    figure = result(tmp_path, "x", {"step": 0, "loss": 2.0}, {"step": 1, "loss": 1.0}).plot()
    bundle, _ = DisplayFormatter().format(figure)
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules


def test_plot_without_metrics_or_matplotlib_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="nothing was logged: call tpunb"):
        result(tmp_path, "empty").plot()
    monkeypatch.delitem(sys.modules, "tpunb.runs.figures")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"pip install .*matplotlib"):
        result(tmp_path, "x", {"loss": 2.0}).plot()
