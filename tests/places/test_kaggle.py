"""Runs on Kaggle: decisions before the run, the pushed notebook, and all that a session can do.

Kaggle's own client talks to a stand-in of the service. These tests push scripts that print what a
session would; `tests/scenarios/test_kaggle.py` has whole runs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.kaggle import KEY, KaggleProject
from tests.fakes.kaggle_kernels import Session
from tests.places.test_kaggle_service import script, wait_until_over
from tpunb.places import kaggle as places_kaggle
from tpunb.places import kinds, log_stream
from tpunb.places.config import KaggleSettings, PlaceConfig, find_place
from tpunb.places.errors import PlaceError
from tpunb.places.kaggle import (
    KagglePlace,
    KaggleRun,
    KaggleTarget,
    _slug,
    find_kaggle,
    inspect_kaggle,
    place_here,
)
from tpunb.places.kaggle_service import NoAnswerError, SessionStatus
from tpunb.places.log_stream import Packer
from tpunb.places.place import ConnectionLost
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note, Phase, from_line
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunSpec, RunState
from tpunb.runs.stream import Append, End, Line, Replace, Stop
from tpunb.utils.errors import DataError, TpunbError

RUN = "20261123-051425-train"
REF = f"somebody/tpunb-{RUN}"
LINES: list[Line] = [
    Append("run.log", 0, b"[0] hello\n", 1.0),
    Append("metrics.jsonl", 0, b'{"step": 1}\n', 2.0),
    Replace("result.json", b'{"returncode": 0}', 3.0),
]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {
        **{"POLL_INTERVAL": 0.01, "ASK": 0.05, "LATE": 0.5, "OUTPUT": 0.5, "SILENT": 60.0},
        **{"LOST": 60.0, "STARTS": 0.2},
    }.items():
        monkeypatch.setattr(places_kaggle, name, seconds)
    monkeypatch.setattr(places_kaggle, "AGAIN", (0.02,))
    monkeypatch.setattr(log_stream, "EVERY", 0.0)


@pytest.fixture
def run(kaggle: KaggleProject) -> RunDir:
    run = RunDir(kaggle.folder / "runs" / RUN)
    run.path.mkdir(parents=True)
    run.script.write_text("print(1)\n")
    run.write_spec(RunSpec(RUN, "train", 8, "TPU", ".", (), (), hosts=("kaggle",), place="kaggle"))
    set_cells(run, "pass")
    return run


def set_cells(run: RunDir, *sources: str) -> None:
    cells = [{"source": source, "kind": "code"} for source in sources]
    run.snapshot.write_text(json.dumps({"cells": cells, "train": len(cells) - 1}))


def opened(run: RunDir, **settings: Any) -> KagglePlace:
    config = PlaceConfig("kaggle", "kaggle", Path("places.toml"), KaggleSettings(**settings))
    placed = KaggleRun(config, REF, str(run.path.parents[1]), 19.0, detached=True)
    placed.write(run)
    return KagglePlace(run, placed)


def found(kaggle: KaggleProject) -> KaggleTarget:
    place = find_place("kaggle", kaggle.folder)
    return find_kaggle(place, kaggle.folder, print, lambda: False)


def texts(run: RunDir) -> list[str]:
    events = map(from_line, run.events.read_text().splitlines())
    return [event.text for event in events if isinstance(event, Note | Phase)]


def printing(*lines: Line, then: str = "", wait: str = "") -> str:
    """A script that prints the packed output of a session, one pack for each line."""
    packer, printed = Packer(), []
    for line in lines:
        packer.add(line)
        printed.append(packer.due(last=True))
    return (
        "import os, sys, time\n"
        f"for text in {printed!r}:\n    print(text, end='', file=sys.stderr, flush=True)\n"
        f"    {wait or 'time.sleep(0.02)'}\n{then}\n"
    )


def push(place: KagglePlace, kaggle: KaggleProject, text: str, **fields: Any) -> Session:
    place._service.push(script(text, slug=REF, new_title=REF.split("/")[1], **fields))
    return kaggle.service.sessions[REF]


def followed(place: KagglePlace) -> list[Line | ConnectionLost]:
    return [said.line for said in place.follow([{}]) if said is not None]


def gone(place: KagglePlace, *, final: bool = True) -> str:
    *_, last = followed(place)
    assert isinstance(last, ConnectionLost)
    assert last.final == final
    return last.reason


# Before


def test_kaggle_target_cores_cost_and_quota(kaggle: KaggleProject) -> None:
    target = found(kaggle)
    assert (target.hosts, target.device, target.choose_cores("all")) == (("kaggle",), "TPU", 8)
    with pytest.raises(ValueError, match="8 chips, which start together or not at all"):
        target.choose_cores(2)
    first, left = target.estimate.describe(None)
    assert first.startswith("TpuV5E8 on Kaggle: 1.00 TPU hours an hour")
    assert first.endswith("at most 9.00 TPU hours, in 9 h 00 min")
    assert left == "left: 19.00 TPU hours, until 2026-11-28 00:00 UTC"
    assert "no way to stop a session" in target.cannot["stop"]
    placed = target.placed(RUN, detached=False)
    assert (placed.ref, placed.detached) == (REF, True)
    assert placed.url in placed.cannot_stop
    assert "1.00 of 20" not in inspect_kaggle(target.place).text()
    assert "19.00 of 20 TPU hours left" in inspect_kaggle(target.place).text()


def test_quota_used_up_is_refused(kaggle: KaggleProject) -> None:
    kaggle.service.used = kaggle.service.allowed
    with pytest.raises(PlaceError, match=r"20 TPU hours on Kaggle are used up; .* 2026-11-28"):
        found(kaggle)
    report = inspect_kaggle(find_place("kaggle", kaggle.folder))
    assert report.problems() == [("kaggle", "this week's quota is used up")]
    kaggle.set_place(accelerator="")
    assert found(kaggle).device == "CPU"


def test_interrupt_before_the_push_starts_nothing(kaggle: KaggleProject) -> None:
    with pytest.raises(TpunbError, match="nothing was started"):
        kinds.find_target("kaggle", kaggle.folder, print, lambda: True)
    kaggle.service.trouble["GetAcceleratorQuotaStatistics"] = [-1]
    with pytest.raises(TpunbError, match="nothing was started"):
        kinds.find_target("kaggle", kaggle.folder, print, lambda: bool(kaggle.service.hanging))


# What is sent


def started(place: KagglePlace, **variables: str) -> None:
    place.start(variables, lambda text: None, lambda: False)


def test_push_contents_and_settings(kaggle: KaggleProject, run: RunDir) -> None:
    kaggle.service.hold.clear()
    (run.path.parents[1] / "helper.py").write_text("")
    set_cells(
        run,
        "%tpu_data kaggle://datasets/me/cats/versions/3 --to x\n"
        "%tpu_data --to y https://www.kaggle.com/competitions/titanic/data\n",
        "%tpu_data kaggle://models/google/gemma/pytorch/2b/1\n%tpu_data out --upload gs://b/x\n",
    )
    place = opened(run, internet=False, session_hours=2.0, files=("helper.py",))
    started(place, TPUNB_RESUME=f"kaggle-output:{REF}-before", LEARNING_RATE="0.1")
    asked = dict(kaggle.service.sessions[REF].asked)
    text = asked.pop("text")
    assert "kaggle_session.bring('--to', 'y', 'https://www.kaggle.com/competitions" in text
    assert "`helper.py`" in text
    assert "--upload" not in text
    assert asked == {
        "slug": REF,
        "newTitle": f"tpunb {RUN.replace('-', ' ')}",
        "language": "python",
        "kernelType": "notebook",
        "isPrivate": True,
        "enableInternet": False,
        "machineShape": "TpuV5E8",
        "sessionTimeoutSeconds": 7200,
        "datasetDataSources": ["me/cats"],
        "competitionDataSources": ["titanic"],
        "modelDataSources": ["google/gemma/pytorch/2b/1"],
        "kernelDataSources": [f"{REF}-before"],
    }
    assert place.state() is RunState.WAITING
    unknown = "me/cats, titanic, somebody/"
    assert any(unknown in text and "does not know" in text for text in texts(run))


@pytest.mark.parametrize(
    ("cell", "variables", "words"),
    [
        ("pass", {"HF_TOKEN": "hf_x"}, r"HF_TOKEN may be a secret, .* Secrets"),
        (f"key = {KEY!r}", {}, "contains the key or token of your login"),
        ("%tpu_data kaggle://datasets/{me}/cats", {}, "without variables"),
        ("%tpu_data kaggle://datasets/cats", {}, "the forms"),
        ("x = '" + "".join(map(chr, range(256, 400))) * 4000 + "'", {}, "would take .* accepts"),
    ],
)
def test_push_that_is_refused(
    kaggle: KaggleProject, run: RunDir, cell: str, variables: dict[str, str], words: str
) -> None:
    run.script.write_text(cell)
    set_cells(run, cell)
    with pytest.raises((PlaceError, DataError), match=words):
        started(opened(run), **variables)
    assert not kaggle.service.sessions


def test_push_whose_answer_is_lost_is_looked_up(kaggle: KaggleProject, run: RunDir) -> None:
    kaggle.service.trouble["SaveKernel"] = [500]
    with pytest.raises(PlaceError, match="HTTP 500: the run has not started"):
        started(opened(run))
    kaggle.service.hold.clear()
    kaggle.service.lose_answer = True
    started(opened(run))
    assert list(kaggle.service.sessions) == [REF]


@pytest.mark.parametrize(
    "late", [SessionStatus("QUEUED"), NoAnswerError("Kaggle answers with HTTP 500")]
)
def test_push_with_a_late_status_answer(
    kaggle: KaggleProject,
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    late: SessionStatus | PlaceError,
) -> None:
    """A notebook that Kaggle does not know at once may have started all the same."""
    place = opened(run)
    monkeypatch.setattr(place, "_fields", lambda variables: script("pass"))
    kaggle.service.trouble["SaveKernel"] = [500]
    answers = iter([None, late])

    def status(ref: str) -> SessionStatus | None:
        if isinstance(answer := next(answers), PlaceError):
            raise answer
        return answer

    monkeypatch.setattr(place._service, "status", status)
    if isinstance(late, SessionStatus):
        started(place)
    else:
        with pytest.raises(PlaceError, match=f"is not known.* uses quota: .*{REF}"):
            started(place)


def test_credentials_in_files_to_push_are_refused(kaggle: KaggleProject, run: RunDir) -> None:
    (run.path / "parameters.json").write_text(json.dumps({"api": KEY}))
    with pytest.raises(PlaceError, match=r"parameters.json contains the key or token"):
        started(opened(run))
    (run.path / "parameters.json").unlink()
    (kaggle.folder / "kaggle.json").write_text(json.dumps({"key": KEY}))
    with pytest.raises(PlaceError, match=r"kaggle.json contains the key or token"):
        started(opened(run, files=("*.json",)))
    assert not kaggle.service.sessions


def test_long_run_names_give_different_slugs() -> None:
    first, second = (_slug(f"{RUN}-with-a-very-long-name{end}") for end in ("", "-2"))
    assert first != second
    assert max(len(first), len(second)) <= 50
    assert _slug(RUN) == f"tpunb-{RUN}"


# While it runs


def test_follow_a_run_to_its_end(kaggle: KaggleProject, run: RunDir) -> None:
    place = opened(run)
    push(place, kaggle, printing(*LINES, End(0)))
    assert followed(place) == [*LINES, End(0)]
    assert followed(opened(run)) == [*LINES, End(0)]  # once more, after the end of the session
    assert texts(run)[-1].startswith("quota: 19.00 TPU hours left before the run, 19.00 now")
    assert place.state() is RunState.SUCCEEDED


def test_log_that_is_cut_repeatedly_is_complete(kaggle: KaggleProject, run: RunDir) -> None:
    place = opened(run)
    kaggle.service.cut_after = [0, 1, 2, 2]
    kaggle.service.trouble["logs"] = [502, 504]
    session = push(place, kaggle, printing(*LINES, End(0), wait="time.sleep(0.3)"))
    assert followed(place) == [*LINES, End(0)]
    assert session.streamed > 4


def test_log_that_stalls_is_reconnected(
    kaggle: KaggleProject, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection is cut without notice on this side."""
    monkeypatch.setattr(places_kaggle, "SILENT", 0.3)
    place = opened(run)
    session = push(place, kaggle, printing(*LINES, End(0), wait="time.sleep(0.5)"))
    assert followed(place) == [*LINES, End(0)]
    assert session.streamed > 1


def test_follow_ends_although_kaggle_reports_running(kaggle: KaggleProject, run: RunDir) -> None:
    kaggle.service.too_early = 10_000
    place = opened(run)
    push(place, kaggle, printing(*LINES, End(0)))
    assert followed(place) == [*LINES, End(0)]
    assert any("still reports its session as running" in text for text in texts(run))


def test_follow_shows_a_queued_session(kaggle: KaggleProject, run: RunDir) -> None:
    kaggle.service.hold.clear()
    place = opened(run)
    push(place, kaggle, printing(*LINES, End(0)))
    said = []
    for each in place.follow([{}]):
        said += [] if each is None else [each.line]
        if run.events.exists() and "waiting in Kaggle's queue" in texts(run):
            kaggle.service.hold.set()
    assert said == [*LINES, End(0)]


def test_stop_says_that_kaggle_cannot_stop_a_session(kaggle: KaggleProject, run: RunDir) -> None:
    place = opened(run)
    place.stop(Stop())
    place.stop(Stop(now=True))
    first, second = texts(run)
    assert f"https://www.kaggle.com/code/{REF}" in second
    assert "continues to use quota" in second
    assert first == f"{second}. Interrupt again to stop following it"


@pytest.mark.parametrize(
    ("then", "fields", "words"),
    [
        ("sys.exit(1)", {}, r"before the run had ended \(ERROR: Your notebook failed"),
        ("time.sleep(60)", {"session_timeout_seconds": 1}, "exceeded its time limit"),
    ],
)
def test_session_that_ends_before_the_run_is_explained(
    kaggle: KaggleProject, run: RunDir, then: str, fields: dict[str, Any], words: str
) -> None:
    place = opened(run)
    push(place, kaggle, printing(LINES[0], then=then), **fields)
    said = list(followed(place))
    assert said[0] == LINES[0]
    assert isinstance(said[-1], ConnectionLost)
    assert said[-1].final
    assert re.search(words, said[-1].reason)


def test_log_without_an_end_is_completed_from_the_output(
    kaggle: KaggleProject, run: RunDir
) -> None:
    ended = RunResult(RunState.FAILED, "n", 8, "TPU", 1.0, 2.0, Path("/"), returncode=3)
    writes = "os.mkdir('tpunb-run')\n" + "".join(
        f"open('tpunb-run/{name}', 'w').write({content!r})\n"
        for name, content in {
            "run.log": "[0] hello\n[0] more\n",
            "result.json": json.dumps(ended.to_json()),
            "spec.json": "not for here",
        }.items()
    )
    place = opened(run)
    push(place, kaggle, printing(LINES[0], then=writes))
    first, log, result, end = followed(place)
    assert first == LINES[0]
    assert isinstance(log, Append)
    assert (log.file, log.at, log.data) == ("run.log", 0, b"[0] hello\n[0] more\n")
    assert isinstance(result, Replace)
    assert (result.file, end) == ("result.json", End(3))


def test_deleted_or_unsent_notebook_is_a_lost_run(kaggle: KaggleProject, run: RunDir) -> None:
    """The run was interrupted before it was sent, or the notebook was deleted."""
    assert "was deleted, or the run was never sent" in gone(opened(run))
    assert opened(run).state() is RunState.LOST


def test_run_cancelled_on_the_kaggle_page(kaggle: KaggleProject, run: RunDir) -> None:
    place = opened(run)
    session = push(place, kaggle, printing(LINES[0]))
    wait_until_over(kaggle)
    session.status = "CANCEL_ACKNOWLEDGED"
    assert "was cancelled on its page" in gone(place)
    assert place.state() is RunState.INTERRUPTED


def test_kaggle_outage_keeps_the_run_attachable(
    kaggle: KaggleProject, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places_kaggle, "LOST", 0.5)
    place = opened(run)
    push(place, kaggle, printing(LINES[0], then="time.sleep(60)"))
    kaggle.service.trouble["logs"] = kaggle.service.trouble["GetKernelSessionStatus"] = [503] * 999
    reason = gone(place, final=False)
    assert f"`tpunb attach {RUN}` follows it again" in reason
    assert "HTTP 503" in reason


def test_follow_with_another_login_is_refused(
    kaggle: KaggleProject, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = opened(run)
    monkeypatch.setenv("KAGGLE_USERNAME", "another")
    assert "the run belongs to somebody on Kaggle" in gone(place, final=False)
    monkeypatch.delenv("KAGGLE_USERNAME")
    assert "not logged in" in gone(opened(run), final=False)


# Its files


def test_fetch_of_outputs_after_the_end(kaggle: KaggleProject, run: RunDir) -> None:
    place = opened(run)
    kaggle.service.hold.clear()
    names = ["submission.csv", "tpunb-run/checkpoints/a/b.pt", "tpunb-run/run.log"]
    folders = "import os\nos.makedirs('tpunb-run/checkpoints/a')\n"
    push(place, kaggle, f"{folders}for name in {names}: open(name, 'w').close()")
    with pytest.raises(PlaceError, match=r"only after its end: https://.*/code/"):
        place.fetch(["checkpoints"], run.path)
    kaggle.service.hold.set()
    wait_until_over(kaggle)
    assert place.fetch(["checkpoints/"], run.path) == [run.path / "checkpoints/a/b.pt"]
    assert place.fetch(["outputs/*.csv"], run.path) == [run.path / "outputs/submission.csv"]
    assert not run.log.exists()


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("tpunb-run/returns/x.pt", "returns/x.pt"),
        ("tpunb-run/run.log", None),
        ("tpunb-run/place.json", None),
        ("a/b", "outputs/a/b"),
        ("a/__pycache__/b.pyc", None),
        ("/etc/passwd", None),
        ("tpunb-run/../../x", None),
        ("a//b", None),
    ],
)
def test_output_paths_in_the_run_folder(name: str, place: str | None) -> None:
    assert place_here(name) == place


def test_resume_from_a_kaggle_run_or_a_bucket(kaggle: KaggleProject, run: RunDir) -> None:
    target = found(kaggle)
    with pytest.raises(TpunbError, match="was not on Kaggle"):
        target.resume(run)
    opened(run)
    assert target.resume(run) == f"kaggle-output:{REF}"
    kaggle.set_place(checkpoints="gs://bucket/runs")
    assert found(kaggle).resume(run) == f"gs://bucket/runs/{RUN}"
