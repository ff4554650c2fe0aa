"""JupyterLab and Notebook 7 as a person uses them: real servers, and a browser."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, expect

from tests.drivers import browser as browsers
from tests.drivers.browser import APPS, CHROMIUM, Opened
from tests.drivers.kernel import PATIENCE, until
from tpunb.runs import state
from tpunb.runs.directory import list_runs

pytestmark = [
    pytest.mark.usefixtures("starts_processes"),
    pytest.mark.skipif(
        not CHROMIUM.exists() and os.environ.get("CI") != "true",
        reason=f"needs {CHROMIUM} (apt-get install chromium)",
    ),
]

CELLS = {
    # This machine may be busy: a server that answers late has answered.
    "load": """%load_ext tpunb
%tpu_setup --cores 3
from tpunb.notebook.capture.sources import jupyter
jupyter.WAIT = 60.0""",
    "prelude": "import os, time\nfactor = 2",
    "train": """%%tpu_train
import tpunb
tpunb.log(step=7, loss=factor / 4)
print("factor", factor)
while not os.path.exists("go on"):
    time.sleep(0.05)
print("rank", os.environ["RANK"], "done")""",
    "wait": """%%tpu_train
try:
    print("waiting")
    open(f"waiting {os.environ['RANK']}", "w")
    time.sleep(600)
except KeyboardInterrupt:
    open(f"saved {os.environ['RANK']}", "w")
    raise""",
    "below": "print('not', 'reached')",
}


@pytest.fixture(scope="module")
def browser(starts_processes: None) -> Iterator[Browser]:
    with browsers.chromium() as made:
        yield made


@pytest.fixture(params=APPS)
def opened(
    starts_processes: None, browser: Browser, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Opened]:
    with browsers.opened(browser, request.param, CELLS, tmp_path) as made:
        yield made


def test_browser_edit_run_all_and_interrupt(opened: Opened) -> None:
    opened.edit("prelude", "import os, time\nfactor = 3")  # and does not save
    opened.run_all()

    # While it runs: one status, that changes, and below it the lines.
    opened.shows("load", "3 rehearsal cores")
    opened.shows("train", re.compile("training · 3 of 3 ranks · .* · step 7 · .*loss 0.75"))
    opened.shows("train", re.compile(r"\[\S+\] factor 3"))
    expect(opened.output("train").locator("text=training")).to_have_count(1)
    assert "rank 0 done" not in opened.output("train").inner_text()
    status = opened.output("train").locator(".jp-RenderedHTML div").first
    expect(status).to_have_css("border-left-width", "4px")  # it is replaced at any moment

    # It ends: the status stands in the place of the one before.
    (opened.folder / "go on").touch()
    opened.shows("train", re.compile(r"succeeded · 3 ranks · .* · step 7.*loss 0.75"))
    opened.shows("train", "RunResult succeeded on 3 rehearsal cores")
    for rank in range(3):
        opened.shows("train", f"[{rank}] rank {rank} done")
    text = opened.output("train").inner_text()
    assert "training ·" not in text
    assert "Stop" not in text
    assert sorted(re.findall(r"\[(\d)\] rank \1 done", text)) == ["0", "1", "2"]

    # The run folder holds what ran, where it came from, and the file as it was.
    run = list_runs(opened.folder / "runs")[0]  # the oldest; the next one may have begun
    kept = json.loads(run.snapshot.read_text())
    assert (kept["origin"], kept["name"]) == ("the Jupyter server", "small")
    assert kept["path"] == str(opened.folder / "small.ipynb")
    assert kept["notes"] == []
    assert [cell["source"][-10:] for cell in kept["cells"]][1] == "factor = 3"
    assert "factor = 2" in (run.path / "notebook.ipynb").read_text()

    # The stop button; "run all" ends there.
    opened.shows("wait", re.compile(r"\[\S+\] waiting"))
    until(lambda: len(list(opened.folder.glob("waiting *"))) == 3, "all ranks wait")
    opened.stop()
    opened.shows("wait", "stopped (interrupted in the notebook) · 3 ranks")
    opened.shows("wait", "RunInterruptedError: stopped (interrupted in the notebook) after ")
    assert "Traceback" not in opened.output("wait").inner_text()
    assert {path.name for path in opened.folder.glob("saved *")} == {
        f"saved {rank}" for rank in range(3)
    }
    assert "not reached" not in opened.output("below").inner_text()

    # What is saved is the end, not the way there.
    opened.save()
    saved = nbformat.read(opened.folder / "small.ipynb", as_version=4).cells[2].outputs
    shown = [out for out in saved if out.output_type == "display_data"]
    card, panel = (out["data"]["text/plain"] for out in shown)
    assert card.startswith("succeeded · 3 ranks")
    assert panel == ""
    assert "widget" not in str(shown)

    # A new name counts at once, though the kernel was started with the old one; so does a cell
    # that was edited and not run, one that was deleted, and one that was not saved.
    opened.rename("renamed.ipynb")
    opened.edit("prelude", "factor = 4")
    opened.edit("below", "%%tpu_train --dry-run\nprint(factor)")
    opened.run("below")
    opened.shows("below", f"notebook: {opened.folder / 'renamed.ipynb'} (from the Jupyter server)")
    opened.shows("below", "factor = 3")

    # The fixture ends the server; that no process is left after it is looked at for every test.


STEPS = """import os, time, tpunb
step = 0
while not os.path.exists("go on"):
    tpunb.log(step=step, loss=1 / (step + 1))
    print("rank", os.environ["RANK"], "step", step)
    step += 1
    time.sleep(0.05)"""


@pytest.mark.parametrize("app", ["notebook"])
def test_panel_works_while_the_cell_runs_and_is_not_saved(
    app: str, browser: Browser, tmp_path: Path
) -> None:
    setup = "import ipywidgets\n%load_ext tpunb\n%tpu_setup"
    cells = {"load": setup, "train": f"%%tpu_train --cores 2\n{STEPS}", "below": "print('on', 1)"}
    with browsers.opened(browser, app, cells, tmp_path) as opened:
        opened.run_all()
        page, train = opened.page, opened.output("train")
        page.get_by_role("tab", name="log").click(timeout=PATIENCE * 1000)
        train.locator("select:visible").first.select_option("rank 1")
        log = train.locator(".jupyter-widgets pre:visible")
        expect(log).to_contain_text("[1] rank 1 step 60", timeout=PATIENCE * 1000)
        # It is longer than its box, and does not scroll by itself: so the newest is in sight.
        whole = "pre => pre.parentElement.clientHeight < pre.clientHeight"
        until(lambda: log.evaluate(f"{whole} && pre.clientHeight == pre.scrollHeight"), "it is")
        search = train.locator("input[type=text]:visible")
        search.fill("step [0-9]$")
        search.press("Enter")
        lines = "\n".join(f"[1] rank 1 step {step}" for step in range(10))
        expect(log).to_have_text(lines, timeout=PATIENCE * 1000)
        page.get_by_role("tab", name="chart").click()
        chart = train.get_by_role("img", name=re.compile("^loss from 1 to 0"))
        expect(chart.last).to_be_visible(timeout=PATIENCE * 1000)

        (opened.folder / "go on").touch()
        opened.shows("below", "on 1")
        expect(train.locator(".jupyter-widgets")).to_have_count(0)
        opened.save()
        saved_text = (opened.folder / "small.ipynb").read_text()
        assert "widget-view" not in saved_text
        assert '"widgets"' not in saved_text


def test_attach_again_after_an_interrupt_in_the_browser(browser: Browser, tmp_path: Path) -> None:
    setup = "import ipywidgets\n%load_ext tpunb"
    train = f"%%tpu_train --cores 2 --name far --detach\n{STEPS}"
    cells = {"load": setup, "train": train, "attach": "%tpu_attach far"}
    with browsers.opened(browser, "jupyterlab", cells, tmp_path) as opened:
        opened.run_all()
        opened.page.get_by_role("tab", name="log").click(timeout=PATIENCE * 1000)
        opened.output("attach").locator("select:visible").first.select_option("rank 1")
        log = opened.output("attach").locator(".jupyter-widgets pre:visible")
        expect(log).to_contain_text("[1] rank 1 step 1", timeout=PATIENCE * 1000)
        opened.shows("attach", "Stop following")
        opened.save()
        opened.open_again("jupyterlab")
        # What was saved, and that it does not go on here.
        hint = opened.output("attach").get_by_text("no longer connected: %load_ext tpunb, then")
        expect(hint).to_be_visible(timeout=PATIENCE * 1000)
        prompt = opened.cell("attach").locator(".jp-InputPrompt")
        expect(prompt).not_to_have_text("[*]:")

        def idle() -> bool:
            if not opened.is_idle():
                opened.stop()
            return opened.is_idle()

        until(idle, "nobody follows any more")
        [run] = list_runs(opened.folder / "runs")
        assert state.run_state(run) == "running"

        def follows() -> bool:  # what a page is told to run while it connects is dropped
            opened.run("attach")
            try:
                expect(prompt).to_have_text("[*]:", timeout=10_000)
            except AssertionError:
                return False
            return True

        until(follows, "it is followed again")
        (opened.folder / "go on").touch()
        opened.shows("attach", "RunResult succeeded on 2 rehearsal cores")
