from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tpunb import errors
from tpunb.diagnostics.failure import Diagnosis
from tpunb.runs.result import Failure, RunResult
from tpunb.runs.spec import FailureKind, Price
from tpunb.runs.trained_models import DifferentModels

FAILURE = Failure(
    rank=2,
    pid=7,
    exitcode=1,
    signal=None,
    type="ValueError",
    message="got 17",
    cell=7,
    line=3,
    traceback="Traceback (most recent call last):\n  cell [7], line 3, in <module>\n",
    time=5.0,
)


def result(tmp_path: Path, **values: object) -> RunResult:
    made = RunResult("succeeded", "n", 4, "CPU", 100.0, 112.5, tmp_path)
    return replace(made, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failure", "headline"),
    [
        (FAILURE, "rank 2 failed in cell [7], line 3: ValueError: got 17"),
        (replace(FAILURE, message=""), "rank 2 failed in cell [7], line 3: ValueError"),
        (
            replace(FAILURE, rank=None, line=None),
            "re-running cell [7] for the ranks failed: ValueError: got 17",
        ),
        (
            replace(FAILURE, kind=FailureKind.EXIT, message="ended with exit code 3", cell=None),
            "rank 2 ended with exit code 3",
        ),
        (
            replace(FAILURE, kind=FailureKind.SIGNAL, message="crashed with SIGSEGV"),
            "rank 2 crashed with SIGSEGV in cell [7], line 3",
        ),
    ],
)
def test_failure_headline_in_one_line(failure: Failure, headline: str) -> None:
    assert failure.headline() == headline


def test_failed_result_text_names_error_place_and_log(tmp_path: Path) -> None:
    rest = [replace(FAILURE, rank=rank) for rank in (0, 3)]
    other = replace(FAILURE, rank=1, type="PeerLostError", message="rank 2 ended")
    failed = result(tmp_path, state="failed", failures=(FAILURE, other, *rest))
    text = failed.explain()
    assert text.splitlines()[0] == FAILURE.headline()
    assert "the same in ranks 0,3" in text
    assert "then: rank 1 failed in cell [7], line 3: PeerLostError: rank 2 ended" in text
    assert text.splitlines()[-1] == f"log: {tmp_path / 'run.log'}"
    with pytest.raises(errors.RankFailedError) as caught:
        failed.raise_for_failure()
    assert caught.value.result is failed
    (shown,) = caught.value._render_traceback_()
    assert shown == f"RankFailedError: {text}"
    assert "Traceback" in shown
    caught.value.told = True  # a card shows the rest
    assert caught.value._render_traceback_() == [f"RankFailedError: {FAILURE.headline()}"]
    assert "Traceback" in str(caught.value)
    assert failed.remarks() == text.splitlines()[1:3]
    assert repr([failed]) == f"[RunResult {FAILURE.headline()} · {tmp_path.name}]"


def test_failure_text_order_is_source_cause_traceback(tmp_path: Path) -> None:
    placed = replace(FAILURE, source=((2, "def check(n):"), (3, "    raise ValueError(n)")))
    known = Diagnosis("x", "Too many.", "Take fewer.", (), 1.0, "https://x")
    failed = result(tmp_path, state="failed", failures=(placed,), diagnoses=(known,))
    assert failed.explain().splitlines()[1:] == [
        "",
        "     2  def check(n):",
        "❯    3      raise ValueError(n)",
        "",
        "Too many. [x]",
        "  fix: Take fewer.",
        "  see https://x",
        "",
        "Traceback (most recent call last):",
        "  cell [7], line 3, in <module>",
        "",
        f"log: {tmp_path / 'run.log'}",
    ]
    assert "Traceback" not in str(failed)
    data = json.loads(json.dumps(failed.to_json()))
    assert RunResult.from_json(data, tmp_path) == replace(failed, diagnoses=())


@pytest.mark.parametrize(
    ("state", "error"),
    [("timed_out", errors.RunTimeoutError), ("interrupted", errors.RunInterruptedError)],
)
def test_stopped_result_text(tmp_path: Path, state: str, error: type[Exception]) -> None:
    stopped = result(tmp_path, state=state, reason="because")
    with pytest.raises(error, match=r"\(because\) after 12.5 s; all 4 ranks have ended"):
        stopped.raise_for_failure()
    assert repr(stopped).endswith(f"(because) after 12.5 s · {tmp_path.name}")
    assert stopped.remarks() == []
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "1.pt").touch()
    assert stopped.remarks() == [
        f"to continue from its last checkpoint: %%tpu_train --resume {tmp_path.name}"
    ]


def test_succeeded_result_text(tmp_path: Path) -> None:
    whole = result(tmp_path, returns={"w": 1})
    line = "RunResult succeeded on 4 rehearsal cores after 12.5 s"
    assert repr(whole) == f"{line} · returned: w · {tmp_path.name}"
    good = result(tmp_path, returns={"w": 1}, returns_failed={"lock": "cannot be pickled"})
    good.raise_for_failure()
    assert good.duration == 12.5
    line += ", but lock was not returned · returned: w"
    assert repr(good) == f"{line} · {tmp_path.name}"
    assert str(good).startswith(f"{line} · rehearsal on CPU")
    for device in ("TPU", "GPU"):
        assert "rehearsal" not in str(result(tmp_path, device=device))
    assert good.remarks() == ["lock was not returned: cannot be pickled"]
    assert good.remarks()[0] in str(good)
    assert result(tmp_path, world_size=1, device="TPU").cores() == "1 TPU core"
    assert result(tmp_path, world_size=2, device="GPU").cores() == "2 GPUs"


def test_result_text_of_ranks_with_different_models(tmp_path: Path) -> None:
    place = "cell [4], line 9"
    different = DifferentModels(place, alone=False, ranks=(0, 1), difference=0.25)
    found = result(tmp_path, different_models=different)
    assert found.state == "succeeded"
    found.raise_for_failure()
    said = ", but the ranks trained different models"
    assert found.headline().endswith(said)
    assert repr(found).count(said) == str(found).count(said) == 1
    assert "the models of ranks 0 and 1 differ by 25.00% at the end" in str(found)
    assert "stepped at cell [4], line 9" in str(found)
    assert found.remarks()[0] in found.explain()
    written = json.loads(json.dumps(found.to_json()))
    assert RunResult.from_json(written, tmp_path).different_models == different
    missing = replace(found, returns_failed={"w": "no such name"})
    assert missing.lacks() == ", but w was not returned and the ranks trained different models"
    alone = replace(found, different_models=DifferentModels(place, alone=True))
    assert alone.lacks() == ", but each rank trained by itself"
    assert RunResult.from_json(alone.to_json(), tmp_path).different_models == alone.different_models


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"returns": {"w": 1}}, "this run was not started by tpunb.launch"),
        ({"state": "interrupted", "reason": "because"}, r"did not succeed: .* \(because\)"),
        ({"returns_failed": {"value": "too odd"}}, "it was not returned: too odd"),
    ],
)
def test_the_value_of_a_launched_function(
    tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    assert result(tmp_path, returns={"value": None}).value is None
    without = result(tmp_path, **values)
    assert not hasattr(without, "value")
    with pytest.raises(AttributeError, match=words):
        _ = without.value


def test_cost_of_a_run_in_its_result(tmp_path: Path) -> None:
    price = Price(9.6, "v5litepod-8 in us-west4, on demand", "2026-11-21", "a catalogue")
    known, unknown = result(tmp_path, price=price), result(tmp_path)
    assert known.cost == pytest.approx(9.6 * 12.5 / 3600, abs=1e-4)
    assert unknown.cost is None
    words = (
        "cost: about $0.03 (v5litepod-8 in us-west4, on demand: $9.60 an hour, as of 2026-11-21)"
    )
    assert str(known).splitlines()[-1] == words
    assert "cost: " not in str(unknown)
    failed = replace(known, state="failed", failures=(FAILURE,))
    assert failed.explain().splitlines()[-2] == words
    data = json.loads(json.dumps(known.to_json()))
    assert (data["cost"], data["price"]["per_hour"]) == (known.cost, 9.6)
    assert RunResult.from_json(data, tmp_path) == known


def test_steps_of_attempts_join_without_doubles(tmp_path: Path) -> None:
    rows = [(0, step, 0, 100.0 + step) for step in range(5)]
    rows += [(0, step, 1, 100.0 + step) for step in range(4)]
    rows += [(1, step, rank, 110.0 + step) for step in range(3, 7) for rank in (0, 1)]
    rows += [(0, None, 0, 100.5)]
    lines = [
        json.dumps({"attempt": a, "step": step, "rank": rank, "time": time, "loss": 1.0 - a})
        for a, step, rank, time in rows
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    frame = result(tmp_path).metrics()
    counted = frame.dropna(subset="step")
    assert not counted.duplicated(["step", "rank"]).any()
    assert sorted(set(counted["step"])) == list(range(7))
    assert list(counted[counted["rank"] == 0]["loss"]) == [1.0] * 3 + [0.0] * 4
    assert len(frame) - len(counted) == 1
    assert "attempt" not in frame
