"""Comparing runs, read from run folders."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tpunb
from tests.runs.test_listing import made
from tpunb.errors import TpunbError
from tpunb.runs import last_run
from tpunb.runs.directory import RunDir
from tpunb.runs.parameters import parameters


def cell(index: int, source: str, *tags: str) -> dict[str, Any]:
    return {"index": index, "kind": "code", "source": source, "tags": tags}


def ran(
    folder: Path, name: str, *cells: dict[str, Any], state: str | None = "succeeded", **logged: Any
) -> RunDir:
    """Make a run with these cells above its train cell, and metrics of two ranks."""
    run = made(folder, name, state=state)
    every = [*cells, cell(len(cells), "batch_size = 1")]
    run.snapshot.write_text(json.dumps({"cells": every, "train": len(cells)}))
    rows = [
        {"rank": rank, "attempt": 0, "step": step, "time": 1_700_000_001.0, metric: value + rank}
        for metric, values in logged.items()
        for step, value in enumerate(values)
        for rank in (0, 1)
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


TAGGED = cell(0, "lr = 0.1\nname: str = 'x'\nwide = [1, 2]\nseen = len('abc')", "parameters")


def test_comparison_table_has_a_row_per_run(tmp_path: Path) -> None:
    injected = cell(1, "# Parameters\nlr = -2", "injected-parameters")
    loose = [cell(0, "%load_ext tpunb"), cell(1, "depth, lr = 3, 4\nseed = 7\na = b = 1")]
    first = ran(tmp_path, "one", TAGGED, injected, loss=[3.0, 1.0, 2.0], lr=[0.5, 0.25])
    second = ran(tmp_path, "two", *loose, state="failed", accuracy=[0.25, 0.5])
    lost = tmp_path / "20200101-000000-lost"
    lost.mkdir()
    (lost / "spec.json").touch()
    os.utime(lost, (0, 0))
    frame = tpunb.runs(tmp_path)
    assert frame.index.name == "run"
    assert set(frame.index) == {first.id, second.id, lost.name}
    assert list(frame.columns[:3]) == ["name", "state", "duration"]
    assert list(frame.columns[-5:-1]) == ["cores", "device", "started", "resumed_from"]
    assert {*frame.columns[3:-5], frame.columns[-1]} == {
        "notebook",
        "params.lr",
        "params.name",
        "params.seed",
        "best.loss",
        "best.accuracy",
        "last.lr",
    }
    one, two = frame.loc[first.id], frame.loc[second.id]
    assert one["name"] == "one"
    assert (one["state"], one["cores"], one["device"]) == ("succeeded", 2, "CPU")
    assert one["duration"] == 61.0
    assert one["started"] == pd.Timestamp(1_700_000_000, unit="s")
    assert (one["params.lr"], one["params.name"]) == (-2, "x")
    assert (one["best.loss"], one["last.lr"]) == (1.5, 0.75)  # means of two ranks
    assert (two["state"], two["params.seed"], two["best.accuracy"]) == ("failed", 7, 1.0)
    assert pd.isna(two["params.lr"])
    assert frame.loc[lost.name, "state"] == "lost"


def test_comparison_parameters_are_those_of_the_run_without_secrets(tmp_path: Path) -> None:
    """papermill's values and the kernel's, without secrets."""
    cells = [
        TAGGED,
        cell(1, "lr = 5\nextra = 6"),  # injected, and not known to be
        cell(2, "other = 1\napi_key = 'abc'"),
    ]
    run = ran(tmp_path, "one", *cells)
    assert parameters(run) == {"lr": 5, "name": "x"}
    run.values.write_text(json.dumps({"lr": 7, "config.width": 8}))
    assert parameters(run) == {"lr": 7, "name": "x", "config.width": 8}
    assert tpunb.runs(tmp_path).loc[run.id, "params.config.width"] == 8
    two = ran(tmp_path, "two", cell(0, "other = 1\napi_key = 'abc'"))
    assert parameters(two) == {"other": 1}


def lines(figure: Any) -> dict[str, list[float]]:
    [axis] = figure.axes
    return {str(line.get_label()): np.asarray(line.get_ydata()).tolist() for line in axis.lines}


def test_plot_of_several_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = ran(tmp_path, "one", TAGGED, loss=[3.0, 1.0])
    other = ran(tmp_path, "other", TAGGED, loss=[2.0, 0.0])
    ran(tmp_path, "silent")
    both = {"one": [3.5, 1.5], "other": [2.5, 0.5]}
    assert lines(tpunb.plot(folder=tmp_path)) == both
    result = one.read_result()
    assert result is not None
    assert lines(tpunb.plot(result, "-other", folder=tmp_path)) == both
    frame = tpunb.runs(tmp_path)
    chosen = frame[frame["best.loss"] < 1]
    assert [*lines(tpunb.plot(chosen, folder=tmp_path)).values()] == [[2.5, 0.5]]
    assert [*chosen.index] == [other.id]
    with pytest.raises(TpunbError, match="has 'none' in its id"):
        tpunb.plot("none", folder=tmp_path)
    elsewhere = ran(tmp_path, "elsewhere", loss=[9.0])
    elsewhere.snapshot.write_text('{"path": "/another.ipynb"}')
    monkeypatch.setattr(last_run, "result", elsewhere.read_result())
    assert lines(tpunb.plot(folder=tmp_path)) == {"elsewhere": [9.5]}


def test_a_metric_can_be_chosen(tmp_path: Path) -> None:
    one = ran(tmp_path, "one", loss=[3.0], accuracy=[0.0])
    ran(tmp_path, "two", loss=[1.0])
    ran(tmp_path, "three", error=[1.0])
    of_all = tpunb.plot("loss", folder=tmp_path)
    assert lines(of_all) == {"one": [3.5], "two": [1.5]}
    assert [axis.get_ylabel() for axis in of_all.axes] == ["loss"]
    of_one = tpunb.plot("accuracy", "-one", "loss", folder=tmp_path)
    assert [axis.get_ylabel() for axis in of_one.axes] == ["accuracy", "loss"]
    result = one.read_result()
    assert result is not None
    assert lines(tpunb.plot(result, "loss", folder=tmp_path)) == {"one": [3.5]}
    with pytest.raises(ValueError, match="none of these runs has logged error"):
        tpunb.plot("-one", "error", folder=tmp_path)
    with pytest.raises(TpunbError, match=r"or a metric of that name; the metrics are: accuracy, "):
        tpunb.plot("los", folder=tmp_path)


def test_a_run_with_very_many_metrics_is_named(tmp_path: Path) -> None:
    run = ran(tmp_path, "a", loss=[0.0])
    assert list(tpunb.runs(tmp_path)["best.loss"]) == [0.5]
    os.truncate(run.metrics, 20_000_001)
    with pytest.warns(UserWarning, match=f"no best values for {run.id}: more than 20 MB of metric"):
        found = tpunb.runs(tmp_path)
    assert [column for column in found.columns if "loss" in column or "unread" in column] == []
    with pytest.warns(UserWarning, match="has 20 MB: 20 MB of it are read"):
        figure = tpunb.plot(folder=tmp_path)
    assert [*lines(figure).values()] == [[0.5]]
