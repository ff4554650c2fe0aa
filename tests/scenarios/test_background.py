"""Runs that go on while other cells run, or without their kernel, in real kernels."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.drivers.kernel import PATIENCE, ROOT, Kernel, Ran, kernel, until
from tests.support import left_below
from tpunb.display.front_end import NOTHING
from tpunb.runs import state
from tpunb.runs.directory import RunDir, list_runs
from tpunb.runs.spec import Stop
from tpunb.utils import processes

PRELUDE = "import os, pathlib, sys, time\nrank = lambda: int(os.environ['RANK'])"
UNTIL_TOLD = """
pathlib.Path("at work " + os.environ["RANK"]).touch()
print("at work")
while not os.path.exists("go on"):
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def nb(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("lab")) as made:
        made.run("%load_ext tpunb\n%tpu_setup --cores 2\nimport tpunb", "load").good()
        made.run(PRELUDE, "prelude").good()
        yield made


@pytest.fixture(autouse=True)
def _nothing_of_another_test(
    starts_processes: None, request: pytest.FixtureRequest
) -> Iterator[None]:
    yield
    if "nb" in request.fixturenames:
        nb: Kernel = request.getfixturevalue("nb")
        for run in list_runs(nb.folder / "runs"):
            if state.run_state(run).active:
                state.request_stop(run, Stop(reason="the test has ended", now=True))
        for path in [nb.folder / "go on", *nb.folder.glob("at work *")]:
            path.unlink(missing_ok=True)
        until(lambda: not nb.working(), "no run goes on")


def train(nb: Kernel, source: str, options: str = "") -> Ran:
    return nb.run(f"%%tpu_train {options}\n{dedent(source).strip()}\n", "train")


def at_work(nb: Kernel, ranks: int = 2) -> None:
    until(lambda: len(list(nb.folder.glob("at work *"))) == ranks, "the ranks work")


def last_run(nb: Kernel) -> RunDir:
    return list_runs(nb.folder / "runs")[-1]


def listen(nb: Kernel, first: Ran, *words: str) -> tuple[str, list[dict[str, str]]]:
    """Read until the displays of a cell have been updated to what fits all of these patterns.

    What else the kernel shows meanwhile, and the displays' last bundles. Nobody answers what the
    panel below it asks.
    """
    found: dict[str, dict[str, str]] = dict(first.displays)
    said: list[str] = []

    def fits() -> bool:
        shown = "\n".join(bundle["text/plain"] for bundle in found.values())
        return all(re.search(one, shown, re.MULTILINE) for one in words)

    def come() -> bool:
        try:
            message = nb.client.get_iopub_msg(timeout=0.5)
        except queue.Empty:
            return fits()
        content = message["content"]
        if message["msg_type"] == "update_display_data":
            if content["transient"]["display_id"] in found:  # or else the card of %tpu_setup
                found[content["transient"]["display_id"]] = content["data"]
        elif message["msg_type"] != "status" and message["msg_type"][:5] != "comm_":
            said.append(f"{message['msg_type']} {content}")
        return fits()

    until(come, f"{words} in what is shown")
    return "\n".join(said), [*found.values()]


class TestInTheBackground:
    def test_background_wait_times_out_and_the_run_continues_until_stop(self, nb: Kernel) -> None:
        train(nb, UNTIL_TOLD, "--bg --out h").good()
        at_work(nb)
        waited = nb.run("h.wait(timeout=0.2)", "wait")
        assert "TimeoutError: run " in waited.traceback
        assert "has not ended within 0.2 s; it continues" in waited.traceback
        waiting = nb.send("print('waits'); h.wait()", "wait")
        nb.until(waiting, "waits")
        nb.interrupt()
        assert nb.wait(waiting).error is not None
        assert waiting.error is not None
        assert waiting.error["ename"] == "KeyboardInterrupt"
        assert nb.value("h.state") == "running"
        assert nb.value("h.stop().state") == "interrupted"
        assert nb.value("h.stop().reason") == "stopped with .stop()"
        assert "RunInterruptedError" in nb.run("h.wait()", "wait").traceback

    def test_queued_cell_names_the_run_before_it_and_can_be_interrupted(self, nb: Kernel) -> None:
        train(nb, UNTIL_TOLD, "--bg --out h").good()
        at_work(nb)
        first = nb.value("h.id")
        train(nb, "print('second')", "--bg --out g").good()
        second = nb.value("g.id")
        ran = nb.send("%%tpu_train\nprint('third')", "train")
        # Updates of the handles arrive meanwhile, and go to their own places.
        waits = f"waits for run {second} (2 CPU cores, since "
        until(lambda: nb.read(ran) or waits in ran.screen(), "the cell says so")
        nb.interrupt()
        nb.wait(ran)
        assert ran.error is not None
        assert ran.error["ename"] == "RunInterruptedError"
        listed = nb.run("%tpu_runs", "list").good().screen().splitlines()
        assert [line.split()[1] for line in listed[1:4]] == ["interrupted", "waiting", "running"]
        assert nb.value("g.state") == "waiting"
        stopped = nb.run(f"%tpu_stop {first}", "stop").good().stdout.splitlines()
        assert stopped[0].startswith(f"stopping run {first}: its ranks have 15 s to save")
        assert stopped[1].startswith(f"run {first} has ended: interrupted (stopped with %tpu_stop)")
        assert nb.value("g.wait().state, h.state") == ("succeeded", "interrupted")
        assert f"run {first} has ended: interrupted" in nb.run(f"%tpu_stop {first}").good().stdout
        assert " has ended: succeeded" in nb.run("%tpu_stop", "stop").good().stdout


COUNTS = """
for i in range(60):
    print("line", i)
    if i == 10:
        pathlib.Path("at work " + os.environ["RANK"]).touch()
    while i >= 10 and not os.path.exists("go on"):
        time.sleep(0.05)
weights = [rank()] * 3
"""


class TestDetached:
    def test_detached_run_survives_its_kernel_and_another_attaches(
        self, nb: Kernel, tmp_path: Path
    ) -> None:
        with kernel(tmp_path, "other.ipynb") as doomed:
            doomed.run(f"%load_ext tpunb\n{PRELUDE}", "load").good()
            options = "--detach --cores 2 --returns weights --name far"
            ran = train(doomed, COUNTS, options).good()
            run = last_run(doomed)
            assert ran.value is None
            assert not ran.displays
            assert ran.stdout.splitlines() == [
                f"run {run.id} continues without this notebook, on 2 rehearsal cores",
                f"  follow it and get its result: %tpu_attach {run.id}",
                f"  stop it: %tpu_stop {run.id}",
                f"  in a terminal: tpunb logs --follow {run.id} --runs {tmp_path}/runs",
                f"                 tpunb stop {run.id} --runs {tmp_path}/runs",
            ]
            at_work(doomed)
            of_the_kernel = doomed.processes()
            [supervisor, *_] = [each for each in of_the_kernel if left_below(each.pid)]
            os.kill(supervisor.pid, signal.SIGHUP)  # as of a terminal that is closed
            os.kill(doomed.pid, signal.SIGKILL)
        assert state.run_state(run) == "running"
        nb.run(f"%tpu_setup --runs '{tmp_path}/runs'", "setup").good()
        ran = nb.send("%tpu_attach far --out r", "attach")
        nb.until(ran, "line 1\n")
        nb.interrupt()
        nb.wait(ran).good()
        assert ran.value is None
        assert ran.stdout.endswith(f"run {run.id} is still running; %tpu_stop {run.id} stops it\n")
        assert ran.statuses()[0].startswith("still running; no longer shown here · ")

        (tmp_path / "go on").touch()
        ran = nb.run("%tpu_attach --out r", "attach").good()
        lines = "".join(text for _, text in ran.texts)
        for number in (0, 1):
            mine = re.findall(rf"^\[(?:{number}|0-1)\] (.*)$", lines, re.MULTILINE)
            assert mine == [f"line {i}" for i in range(60)]
        assert ran.shown.startswith("RunResult succeeded on 2 rehearsal cores")
        assert ran.statuses()[0].startswith("succeeded · 2 ranks")
        assert nb.value("weights, r is tpunb.last_run, r.returns") == (
            [0, 0, 0],
            True,
            {"weights": [0, 0, 0]},
        )
        until(lambda: not any(map(processes.is_alive, of_the_kernel)), "nothing of it is left")
        again = nb.run("%tpu_attach far --ranks 1", "attach").good()  # it has ended long ago
        assert re.findall(r"^\[(.*)\] line 59$", again.stdout, re.MULTILINE) == ["1"]
        nb.run("%tpu_setup --runs runs", "setup").good()

    @pytest.mark.usefixtures("starts_processes")
    def test_attach_to_a_foreground_run_from_another_process(self, nb: Kernel) -> None:
        """By a process without a notebook, as another kernel would."""
        ran = nb.send(f"%%tpu_train\n{UNTIL_TOLD}", "train")
        at_work(nb)
        shows = (
            "from tpunb.kernel.launcher import Attached\n"
            "from tpunb.runs.directory import RunDir; import sys\n"
            "run = Attached(RunDir(sys.argv[1]))\n"
            "for event in run.events():\n"
            "    if type(event).__name__ == 'Output': print(event.rank, event.text, flush=True)\n"
            "print(run.result().state)"
        )
        with subprocess.Popen(
            [sys.executable, "-c", shows, str(last_run(nb).path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as process:
            assert process.stdout is not None
            assert "at work" in process.stdout.readline()
            (nb.folder / "go on").touch()
            assert process.communicate(timeout=PATIENCE)[0].splitlines()[-1] == "succeeded"
        nb.wait(ran).good()


def test_background_handle_is_displayed_and_returns_its_values(nb: Kernel) -> None:
    ran = train(nb, f"{UNTIL_TOLD}\nprint('done', rank())\nn = 5", "--bg --returns n --out h")
    ran.good()
    assert ran.texts == []
    assert ran.value is None  # it is displayed already
    card, *below = ran.displays.values()
    assert set(card) == {"text/plain", "text/html"}
    assert below == [NOTHING, NOTHING]  # the places of the panel and the lines
    at_work(nb)
    assert nb.value("h.state, h.result, tpunb.last_run is h") == ("running", None, False)
    shown = nb.run("h", "show").good()
    assert list(shown.displays) == list(ran.displays)
    # Lines of two ranks are one only where they come at the same time.
    lines = (r"^\[0(-1)?\] at work$", r"^\[(0-)?1\] at work$")
    said, _ = listen(nb, shown, *lines, "training · 2 of 2 ranks")
    assert said == ""
    assert re.match(
        r"'BackgroundRun [\d-]+-digits: running \(.wait\(\) ", repr(nb.value("repr(h)"))
    )

    (nb.folder / "go on").touch()
    said, (card, _, printed) = listen(nb, shown, "succeeded")
    assert said == ""
    assert card["text/plain"].startswith("succeeded · 2 ranks · rehearsal on CPU · ")
    assert {"[0] done 0", "[1] done 1"} < set(printed["text/plain"].splitlines())
    until(lambda: nb.value("h.result is not None"), "the result")
    assert nb.value("tpunb.last_run is h.result, h.state, 'n' in globals()") == (
        True,
        "succeeded",
        False,
    )
    assert nb.value("h.result.returns") == {"n": 5}
    waited = nb.run("h.wait()", "wait").good()
    assert waited.shown.startswith("RunResult succeeded on 2 rehearsal cores")
    assert nb.value("n, h.wait() is tpunb.last_run") == (5, True)


def test_background_failure_is_shown_and_raised_by_wait(nb: Kernel) -> None:
    ran = train(nb, "if rank() == 1:\n    raise ValueError('bad batch')", "--bg --out h").good()
    _, (bundle, *_) = listen(nb, ran, "rank 1 failed in", "raise ValueError")
    text = f"rank 1 failed in cell [{ran.number}], line 3: ValueError: bad batch"
    assert bundle["text/plain"].startswith(f"{text} · 2 ranks")
    assert "raise ValueError('bad batch')" in bundle["text/plain"]
    assert "raise ValueError(&#x27;bad batch&#x27;)" in bundle["text/html"]
    waited = nb.run("h.wait()", "wait")
    assert waited.error is not None
    assert waited.error["ename"] == "RankFailedError"
    assert text in waited.traceback
    assert "background" not in waited.traceback
    assert nb.value("h.result.state, tpunb.last_run.state") == ("failed", "failed")
    nb.run("%%tpu_train --bg --out h --no-raise\n1 / 0", "train").good()
    assert nb.value("h.wait().state") == "failed"
