"""JupyterLab and Notebook 7 as a person uses them: real servers, and a browser."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from nbformat import v4
from playwright.sync_api import Browser, Error, Locator, Page, expect, sync_playwright

from tests.kernels import PATIENCE, ROOT, until
from tpunb.rundir import RunDir, runs_in
from tpunb.worker import processes

CHROMIUM = Path("/usr/bin/chromium")
QUIET = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
APPS = {"jupyterlab": "lab/tree/small.ipynb?reset", "notebook": "notebooks/small.ipynb"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CHROMIUM.exists() and os.environ.get("CI") != "true",
        reason=f"needs {CHROMIUM} (apt-get install chromium)",
    ),
]

CELLS = {
    "load": "%load_ext tpunb\n%tpu_setup --cores 3",
    "prelude": "import os, time\nfactor = 2",
    "train": """%%tpu_train
import tpunb
tpunb.log(step=7, loss=factor / 4)
print("factor", factor)
while not os.path.exists("go on"):
    time.sleep(0.05)
print("rank", os.environ["RANK"], "done")""",
    "wait": """%%tpu_train
print("waiting")
try:
    time.sleep(600)
except KeyboardInterrupt:
    open(f"saved {os.environ['RANK']}", "w")
    raise""",
    "below": "print('not', 'reached')",
}


@dataclass
class Opened:
    """A notebook that is open in a browser."""

    page: Page
    folder: Path

    def cell(self, name: str) -> Locator:
        return self.page.locator(".jp-CodeCell").nth(list(CELLS).index(name))

    def output(self, name: str) -> Locator:
        return self.cell(name).locator(".jp-OutputArea").first

    def shows(self, name: str, text: str | re.Pattern[str]) -> None:
        expect(self.output(name)).to_contain_text(text, timeout=PATIENCE * 1000)

    def edit(self, name: str, text: str) -> None:
        self.cell(name).locator(".cm-content").click()
        self.page.keyboard.press("ControlOrMeta+a")
        self.page.keyboard.insert_text(text)

    def run_all(self) -> None:
        """Until the first cell has run: both drop it while they connect to a new kernel."""
        asked = self.cell("load").locator(".jp-InputPrompt")

        def taken() -> bool:
            self.page.get_by_role("menuitem", name="Run", exact=True).click()
            self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
            try:
                expect(asked).to_have_text(re.compile(r"^\[\d+\]:$"), timeout=30_000)
            except AssertionError:
                return False
            return True

        until(taken, "the cells run")

    def run(self, name: str) -> None:
        """Run one cell."""
        self.cell(name).locator(".cm-content").click()
        self.page.keyboard.press("ControlOrMeta+Enter")

    def rename(self, name: str) -> None:
        """Give the file that is open another name, as the menu does it."""
        self.page.get_by_role("menuitem", name="File", exact=True).click()
        self.page.get_by_role("menuitem", name=re.compile("^Rename(…| Notebook…)$")).click()
        dialog = self.page.locator(".jp-Dialog")
        dialog.locator("input").fill(name)
        dialog.get_by_role("button", name=re.compile("^Rename")).click()
        until((self.folder / name).exists, "it is renamed")

    def stop(self) -> None:
        self.page.get_by_role("button", name="Interrupt the kernel").click()

    def save(self) -> None:
        path = self.folder / "small.ipynb"
        before = path.stat().st_mtime_ns

        def saved() -> bool:
            if path.stat().st_mtime_ns == before:
                return False
            try:  # the server writes it in its place: it is cut off for a moment
                return bool(json.loads(path.read_text()))
            except json.JSONDecodeError:
                return False

        self.page.keyboard.press("ControlOrMeta+s")
        until(saved, "it is saved")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        yield made
        made.close()


@pytest.fixture(params=list(APPS))
def opened(browser: Browser, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    folder = tmp_path / "notebooks"
    folder.mkdir()
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [v4.new_code_cell(source) for source in CELLS.values()]
    notebook = v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, folder / "small.ipynb")
    # No question about news, which would stand in front of the notebook.
    news = tmp_path / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    env = {name: value for name, value in os.environ.items() if name[:4] != "JPY_"}
    env |= {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")}
    env |= {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    env |= {"JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings")}
    env |= {"JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces")}
    options = ["--no-browser", "--allow-root", "--ServerApp.port=0", "--IdentityProvider.token="]
    with (
        open(tmp_path / "server.log", "w") as log,
        subprocess.Popen(
            [sys.executable, "-m", request.param, *options, f"--ServerApp.root_dir={folder}"],
            env=env,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as server,
    ):
        page = browser.new_page(viewport={"width": 1200, "height": 1400})
        try:
            where = until(lambda: _address(tmp_path / "RUNTIME"), "the server's address")
            until(lambda: _goes_to(page, f"{where}{APPS[request.param]}"), "the server's answer")
            until(lambda: _has_kernel(page, where), "a kernel")
            idle = page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").first
            idle.wait_for(timeout=PATIENCE * 1000)
            yield Opened(page, folder)
        finally:
            page.close()
            server.terminate()
            server.wait(PATIENCE)


def _goes_to(page: Page, url: str) -> bool:
    """Whether the page opens: the server tells its address a moment before it listens."""
    try:
        page.goto(url, timeout=PATIENCE * 1000)
    except Error as error:
        if "ERR_CONNECTION_REFUSED" not in error.message:
            raise
        return False
    return True


def _has_kernel(page: Page, where: str) -> bool:
    """Whether the notebook is connected to an idle kernel. On a slow machine Lab asks which."""
    select = page.locator(".jp-Dialog").get_by_role("button", name="Select", exact=True)
    if select.count():
        select.click()
    sessions = page.request.get(f"{where}api/sessions").json()
    kernels = [session["kernel"] for session in sessions]
    return any(kernel["execution_state"] == "idle" and kernel["connections"] for kernel in kernels)


def _address(folder: Path) -> str | None:
    for path in folder.glob("jpserver-*.json"):
        try:
            return str(json.loads(path.read_text())["url"])
        except json.JSONDecodeError:  # it is being written
            return None
    return None


def test_a_person_edits_runs_all_looks_on_and_stops(opened: Opened) -> None:
    opened.edit("prelude", "import os, time\nfactor = 3")  # and does not save
    opened.run_all()

    # While it runs: one status, that changes, and below it the lines.
    opened.shows("load", "3 rehearsal cores")
    opened.shows("train", re.compile("training · 3 of 3 ranks · .* · step 7 · .*loss 0.75"))
    opened.shows("train", re.compile(r"\[\S+\] factor 3"))
    opened.shows("train", "edited and not saved, the text that ran is used: cell [2]")
    expect(opened.output("train").locator("text=training")).to_have_count(1)
    assert "rank 0 done" not in opened.output("train").inner_text()
    status = opened.output("train").locator(".jp-RenderedHTML div").first
    expect(status).to_have_css("border-left-width", "4px")  # it is replaced at any moment

    # It ends: the status stands in the place of the one before.
    (opened.folder / "go on").touch()
    opened.shows("train", re.compile(r"succeeded · 3 ranks · .* · step 7.*loss 0.75"))
    opened.shows("train", "RunResult succeeded on 3 rehearsal cores")
    text = opened.output("train").inner_text()
    assert "training ·" not in text
    assert "Stop" not in text
    assert sorted(re.findall(r"\[(\d)\] rank \1 done", text)) == ["0", "1", "2"]

    # The run folder holds what ran, where it came from, and the file as it was.
    run = runs_in(opened.folder / "runs")[0]  # the oldest; the next one may have begun
    kept = json.loads(run.snapshot.read_text())
    assert (kept["origin"], kept["name"]) == ("the Jupyter server", "small")
    assert kept["path"] == str(opened.folder / "small.ipynb")
    assert kept["notes"] == ["edited and not saved, the text that ran is used: cell [2]"]
    assert [cell["source"][-10:] for cell in kept["cells"]][1] == "factor = 3"
    assert "factor = 2" in (run.path / "notebook.ipynb").read_text()

    # The stop button; "run all" ends there.
    opened.shows("wait", re.compile(r"\[\S+\] waiting"))
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
    assert len(shown) == 1
    assert shown[0]["data"]["text/plain"].startswith("succeeded · 3 ranks")

    # A new name counts at once, though the kernel was started with the old one; so does a cell
    # that was edited and not run, one that was deleted, and one that was not saved.
    opened.rename("renamed.ipynb")
    opened.edit("prelude", "factor = 4")
    opened.edit("below", "%%tpu_train --dry-run\nprint(factor)")
    opened.run("below")
    opened.shows("below", f"notebook: {opened.folder / 'renamed.ipynb'} (from the Jupyter server)")
    assert "factor = 3" in opened.output("below").inner_text()


def test_closing_the_server_during_a_run_leaves_nothing(opened: Opened) -> None:
    opened.run_all()
    opened.shows("train", "3 of 3 ranks")
    [run] = runs_in(opened.folder / "runs")
    pids = json.loads(_last_line(run, "RanksStarted"))["pids"]
    ranks = [found for pid in pids if (found := processes.find(pid))]
    assert len(ranks) == 3
    opened.page.close()  # the browser goes first, and changes nothing
    assert all(map(processes.alive, ranks))
    # The fixture ends the server; that no process is left after it is looked at for every test.


def _last_line(run: RunDir, kind: str) -> str:
    return [line for line in run.events.read_text().splitlines() if kind in line][-1]
