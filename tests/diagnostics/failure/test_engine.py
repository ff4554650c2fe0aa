from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import diagnosing
from tests.support import examples
from tpunb.diagnostics.failure import Facts, diagnose, most_relevant_lines

FULL = "[2] OSError: [Errno 28] No space left on device\n"
CLOSED = "[0] RuntimeError: UNAVAILABLE: Socket closed\n"


def ids(text: str, returncode: int | None = None, facts: Facts | None = None) -> list[str]:
    return [found.id for found in diagnose(text, returncode, facts=facts)]


def test_a_cause_comes_before_its_consequences_wherever_they_stand() -> None:
    pool = "BrokenProcessPool: A process in the process pool was terminated abruptly\n"
    for text in (FULL + CLOSED + pool, pool + CLOSED + FULL):
        found = diagnose(text, 17)
        assert found[0].id == "disk-full"
        assert {"tpu-lost", "broken-process-pool"} <= {one.id for one in found}
        confidences = [one.confidence for one in found]
        assert confidences == sorted(confidences, reverse=True)
        assert confidences[1] < 0.5


def test_of_two_causes_the_first_in_the_log_wins() -> None:
    hbm = "[1] RuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.\n"
    assert ids(FULL + hbm) == ["disk-full", "hbm-oom"]
    assert ids(hbm + FULL) == ["hbm-oom", "disk-full"]


def test_a_symptom_alone_is_the_answer() -> None:
    assert ids(CLOSED) == ["tpu-lost"]
    assert ids("", 137) == ids("", -9) == ["process-killed"]


def test_a_run_that_succeeded_has_no_cause() -> None:
    for facts in (Facts(state="succeeded"), Facts(exits={0: 0, 1: 0})):
        assert ids("step 1\n", facts=facts) == []
    assert ids(FULL, 1, facts=Facts(state="succeeded")) == []
    assert ids(FULL, 0) == []


def test_start_rules_rank_lower_once_the_run_has_trained() -> None:
    held = "[0] RuntimeError: The TPU is already in use by process with pid 1.\n"
    assert ids(held + FULL, 1)[0] == "tpu-busy"
    assert ids(held + FULL, 1, facts=Facts(trained=True))[0] == "disk-full"


def test_facts_of_the_run_are_evidence() -> None:
    facts = Facts(
        state="failed",
        exits={0: -15, 3: -9},
        oom_killed=True,
        memory_peak=15 * 2**30,
        memory_limit=16 * 2**30,
    )
    found = diagnose("[3] reading shard 9\n", facts=facts)
    assert [one.id for one in found] == ["host-oom", "process-killed", "sibling-killed"]
    assert found[0].confidence > 0.9
    shown = str(found[0])
    assert "rank 3: ended by SIGKILL" in shown
    assert "out-of-memory killer" in shown
    assert "15.0 of 16.0 GiB" in shown
    assert "rank 0: ended by SIGTERM" in str(found[2])


def test_a_killed_process_alone_does_not_mean_that_memory_ran_out() -> None:
    assert ids("", -9) == ids("", 137) == ids("[1] step 3\n", facts=Facts(exits={1: -9}))
    assert ids("", -9) == ["process-killed"]
    full = Facts(exits={1: -9}, memory_peak=15 * 2**30, memory_limit=16 * 2**30)
    assert ids("", facts=full)[0] == "host-oom"
    little = Facts(exits={1: -9}, memory_peak=2**30, memory_limit=16 * 2**30)
    assert ids("", facts=little) == ["process-killed"]
    # Another rank's own exception is more informative: the others were ended after it.
    assert ids("[0] KeyError: 'lr'\n", facts=Facts(exits={0: 1, 1: -9, 2: -15})) == []


def test_a_refused_allocation_is_not_the_killers_work() -> None:
    refused = (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 40000000000000 bytes. Error code 12 (Cannot allocate memory)"
    )
    assert ids(refused, 1) == ["allocation-refused"]


def test_lines_that_do_not_support_the_cause_are_left_out() -> None:
    facts = Facts(memory_peak=3 * 2**30, memory_limit=16 * 2**30, device_holder="process 1")
    assert len(diagnose(FULL, 1, facts=facts)[0].evidence) == 1


def test_long_evidence_is_shown_on_two_lines_and_the_whole_on_a_screen() -> None:
    text = "".join(
        f"[{n}] No space left on device: {'path/' * 9} {n} {'x ' * 99}\n" for n in range(9)
    )
    shown = str(diagnose(text, 1)[0]).split("\n")
    assert len(shown) <= 20
    assert sum(line.startswith("  | ") for line in shown) >= 3


def test_the_holder_of_the_device_is_shown() -> None:
    text = "TPU initialization failed: open(/dev/vfio/0): Device or resource busy\n"
    found = diagnose(text, 1, facts=Facts(device_holder="process 4711 (python3)"))
    assert found[0].id == "tpu-busy"
    assert "the device is held by process 4711 (python3)" in str(found[0])


def test_evidence_names_ranks_and_cell_and_folds_equal_lines() -> None:
    error = "OSError: [Errno 28] No space left on device: 'a.pt'"
    lines = [
        "[1] Traceback (most recent call last):",
        "[1]   cell [7], line 3, in step",
        f"[1] {error}",
    ]
    text = "\n".join([*lines, f"[3 err] {error}", f"[0] {error}"])
    (found,) = diagnose(text, 1)
    (line,) = found.evidence
    assert (line.text, line.ranks, line.cell) == (error, (0, 1, 3), 7)
    assert f"ranks 0-1,3, cell [7]: {error}"[:80] in str(found)
    assert found.to_json()["evidence"] == [f"ranks 0-1,3, cell [7]: {error}"]


@pytest.mark.parametrize(
    "frame",
    ["Cell In[12], line 4", "<ipython-input-12-0a1b2c> in <module>()", "File In [12], in f"],
)
def test_cells_of_every_ipython_are_read(frame: str) -> None:
    text = f"{frame}\n----> 4 xr.use_spmd()\nRuntimeError: Runtime is already initialized\n"
    assert diagnose(text)[0].evidence[0].cell == 12


def test_json_has_the_keys_that_programs_read() -> None:
    (found,) = diagnose(FULL)
    data = json.loads(json.dumps(found.to_json()))
    assert list(data) == ["id", "cause", "fix", "evidence", "confidence"]
    assert 0 < data["confidence"] <= 1
    assert all(isinstance(line, str) for line in data["evidence"])


def test_an_unknown_failure_gets_no_answer() -> None:
    assert ids("", 1) == []
    assert ids("Traceback (most recent call last):\nKeyError: 'lr'\n", 1) == []


def test_at_most_five_causes_and_a_screen_each() -> None:
    examples = Path(__file__).parent / "examples"
    everything = "".join(path.read_text(encoding="utf-8") for path in examples.glob("*.log"))
    found = diagnose(everything * 20, 1)
    assert len(found) == 5
    assert all(len(str(one).split("\n")) <= 20 for one in found)


@settings(max_examples=examples(60), deadline=None)
@given(st.text(), st.one_of(st.none(), st.integers(-300, 300)))
def test_any_text_gets_an_answer_without_an_error(text: str, returncode: int | None) -> None:
    for found in diagnose(text, returncode):
        assert str(found)


def test_a_long_log_and_a_line_of_ten_megabytes_hide_nothing() -> None:
    steps = "".join(f"[{n % 4}] step {n} loss 0.{n} error rate 0.1\n" for n in range(100_000))
    assert ids(steps + FULL, 1) == ["disk-full"]
    assert ids("x" * 10_000_000 + "\n" + FULL, 1) == ["disk-full"]
    assert ids("word " * 400_000 + "No space left on device " + "word " * 400_000) == ["disk-full"]


def load(name: str) -> list[dict[str, str]]:
    records: list[dict[str, str]] = json.loads(
        (diagnosing.REPORTS / name).read_text(encoding="utf-8")
    )
    return records


def test_the_reports_of_users_are_explained_or_get_no_answer() -> None:
    """The trade-off: none of the reports with a log is wrong; logs unlike them get no answer."""
    if not diagnosing.REPORTS.exists():
        pytest.skip("the reports of users are not beside the repository")
    usable = [one for one in load("failures.json") if one["log_usable"]]
    counts = diagnosing.count(usable)
    assert counts["wrong"] == 0
    assert counts["right"] >= 0.45 * len(usable)


def test_exception_lines_are_preferred_to_lines_that_mention_an_error() -> None:
    steps = [f"[0] step {n} error rate 0.{n}" for n in range(50)]
    text = "\n".join(
        [
            *steps,
            "[1] Traceback (most recent call last):",
            '[1]   File "train.py", line 3, in <module>',
            "[1] KeyError: 'lr'",
            "F0000 00:00:1.2 7 unknown.cc:9] Check failed: a == b",
        ]
    )
    lines = most_relevant_lines(text, most=3)
    assert lines[1:] == ["KeyError: 'lr'", "F0000 00:00:1.2 7 unknown.cc:9] Check failed: a == b"]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            "UserWarning: old\nDeprecationWarning: older\nmypackage.errors.OddError: now\ndone\n",
            ["mypackage.errors.OddError: now"],
        ),
        ("step 1\nzipfile.BadZipFile: no zip\npkg.OldWarning: x\n", ["zipfile.BadZipFile: no zip"]),
        ("[0] ValueError: b\n[1] ValueError: b\nwhat(): a\n" * 3, ["ValueError: b", "what(): a"]),
        ("one\ntwo\n\nthree\n", ["two", "three"]),  # without an exception: the last
        ("", []),
    ],
)
def test_exceptions_are_shown_once_each_in_the_order_of_the_log(
    text: str, lines: list[str]
) -> None:
    assert most_relevant_lines(text, most=2) == lines


def test_a_very_long_line_is_cut() -> None:
    assert max(map(len, most_relevant_lines("ValueError: " + "x" * 100_000))) <= 300
