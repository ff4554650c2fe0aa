"""JupyterLab and Notebook 7 in a real browser, as a person has them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import v4
from playwright.sync_api import Browser, Error, Locator, Page, expect, sync_playwright

from tests.drivers.kernel import PATIENCE, ROOT, until

CHROMIUM = Path("/usr/bin/chromium")
QUIET = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
expect.set_options(timeout=PATIENCE * 1000)
APPS = {"jupyterlab": "lab/tree/small.ipynb?reset", "notebook": "notebooks/small.ipynb"}


@dataclass
class Opened:
    """A notebook that is open in a browser."""

    page: Page
    folder: Path
    names: list[str]
    """Of its cells."""
    address: str

    def cell(self, name: str) -> Locator:
        return self.page.locator(".jp-CodeCell").nth(self.names.index(name))

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
        asked = self.cell(self.names[0]).locator(".jp-InputPrompt")
        number = re.compile(r"^\[\d+\]:$")

        def taken() -> bool:
            self.page.get_by_role("menuitem", name="Run", exact=True).click()
            self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
            try:
                expect(asked).to_have_text(number, timeout=30_000)
            except AssertionError:  # a slow cell has not been dropped
                until(lambda: number.match(asked.inner_text()) or self.is_idle(), "the first cell")
            return number.match(asked.inner_text()) is not None

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

    def is_idle(self) -> bool:
        """Whether the kernel waits, and the page hears it."""
        return _has_kernel(self.page, self.address)

    def open_again(self, app: str) -> None:
        """Close the page, and open it as somebody who comes back."""
        made = self.page.context.browser
        assert made is not None
        size = self.page.viewport_size
        self.page.close()
        self.page = made.new_page(viewport=size)
        self.page.set_default_timeout(PATIENCE * 1000)
        self.page.goto(f"{self.address}{APPS[app]}", timeout=PATIENCE * 1000)
        self.cell(self.names[0]).wait_for(timeout=PATIENCE * 1000)

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


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window."""
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=CHROMIUM, args=QUIET.split(), timeout=PATIENCE * 1000
        )
        yield made
        made.close()


@contextmanager
def opened(
    browser: Browser,
    app: str,
    cells: Mapping[str, str],
    place: Path,
    *,
    size: tuple[int, int] = (1200, 1400),
) -> Iterator[Opened]:
    """A notebook of these cells in a browser, with a kernel; `app` is one of APPS."""
    folder = place / "notebooks"
    folder.mkdir()
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    sources = [v4.new_code_cell(source) for source in cells.values()]
    notebook = v4.new_notebook(cells=sources, metadata={"kernelspec": kernel})
    nbformat.write(notebook, folder / "small.ipynb")
    # No question about news, which would stand in front of the notebook.
    news = place / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    env = {name: value for name, value in os.environ.items() if name[:4] != "JPY_"}
    env |= {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(place / "ipython")}
    env |= {f"JUPYTER_{name}_DIR": str(place / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    env |= {"JUPYTERLAB_SETTINGS_DIR": str(place / "settings")}
    env |= {"JUPYTERLAB_WORKSPACES_DIR": str(place / "workspaces")}
    options = ["--no-browser", "--allow-root", "--ServerApp.port=0", "--IdentityProvider.token="]
    with (
        open(place / "server.log", "w") as log,
        subprocess.Popen(
            [sys.executable, "-m", app, *options, f"--ServerApp.root_dir={folder}"],
            env=env,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as server,
    ):
        page = browser.new_page(viewport={"width": size[0], "height": size[1]})
        page.set_default_timeout(PATIENCE * 1000)
        try:
            where = until(lambda: _address(place / "RUNTIME"), "the server's address")
            until(lambda: _goes_to(page, f"{where}{APPS[app]}"), "the server's answer")
            until(lambda: _has_kernel(page, where), "a kernel")
            idle = page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").first
            idle.wait_for(timeout=PATIENCE * 1000)
            made = Opened(page, folder, list(cells), where)
            yield made
            page = made.page
        finally:
            page.close()
            server.terminate()
            server.wait(PATIENCE)


def _goes_to(page: Page, url: str) -> bool:
    """Whether the page opens: the server tells its address a moment before it listens."""
    try:
        page.goto(url, timeout=PATIENCE * 1000)
    except Error as error:
        # The others are what is said if the page of an earlier attempt comes in between.
        expected = ("ERR_CONNECTION_REFUSED", "chrome-error://", "by another navigation to")
        if not any(one in error.message for one in expected):
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
