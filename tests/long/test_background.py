"""More of tests/scenarios/test_background.py, which takes longer."""

from __future__ import annotations

import re

from tests.drivers.kernel import Kernel, until
from tests.scenarios.test_background import (
    UNTIL_TOLD,
    _nothing_of_another_test,
    at_work,
    last_run,
    listen,
    nb,
    train,
)


def test_background_handle_is_displayed_and_returns_its_values(nb: Kernel) -> None:
    ran = train(nb, f"{UNTIL_TOLD}\nprint('done', rank())\nn = 5", "--bg --returns n --out h")
    ran.good()
    assert ran.texts == []
    assert ran.value is None  # it is displayed already
    bundle, *panel = ran.displays.values()
    assert set(bundle) == {"text/plain", "text/html"}
    # Where ipywidgets has been imported by now: the place of the panel.
    place = f"log: runs/{last_run(nb).id}/run.log (%tpu_logs searches it)"
    assert panel in ([], [{"text/plain": place}])
    at_work(nb)
    assert nb.value("h.state, h.result, tpunb.last_run is h") == ("running", None, False)
    shown = nb.run("h", "show").good()
    assert list(shown.displays) == list(ran.displays)
    assert re.match(
        r"'BackgroundRun [\d-]+-digits: running \(.wait\(\) ", repr(nb.value("repr(h)"))
    )
    # Lines of two ranks are one only where they come at the same time.
    lines = (r"^\[0(-1)?\] at work$", r"^\[(0-)?1\] at work$")
    said, bundle = listen(nb, ran, *lines, "training · 2 of 2 ranks")
    assert said == ""
    assert "at work" in bundle["text/html"]

    (nb.folder / "go on").touch()
    said, bundle = listen(nb, ran, "succeeded")
    assert said == ""
    assert bundle["text/plain"].startswith("succeeded · 2 ranks · rehearsal on CPU · ")
    assert {"[0] done 0", "[1] done 1"} < set(bundle["text/plain"].splitlines())
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
    _, bundle = listen(nb, ran, "rank 1 failed in", "raise ValueError")
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
