"""More of tests/scenarios/test_heard.py, which takes longer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.drivers.kernel import kernel
from tests.scenarios.test_heard import Page

pytestmark = pytest.mark.usefixtures("starts_processes")


def test_panel_of_a_background_run_in_an_idle_kernel(tmp_path: Path) -> None:
    with kernel(tmp_path) as nb:
        nb.run("%load_ext tpunb\nimport ipywidgets", "setup").good()
        page = Page(nb)
        body = "import os, time\nprint('line of', os.environ['RANK'])\n"
        body += "while not os.path.exists('go on'):\n    time.sleep(0.05)"
        train = nb.send(f"%%tpu_train --cores 2 --bg --out run\n{body}", "train")
        page.panel()
        page.say(page.comm("TabModel"), selected_index=1)
        page.shows("line of 1")
        told = page.messages("the cell has ended")
        while train.message not in page.idle:
            next(told)
        page.say(page.ranks(), index=2)
        page.shows(">[1] line of 1</pre>")
        (tmp_path / "go on").touch()
        page.shows("<b>succeeded</b>")
        told = page.messages("the rest of the panel is closed")
        while page.widgets() != ["HTMLModel", "VBoxModel"]:
            next(told)
        nb.run("run.wait(); None", "wait").good()
        shown = nb.run("run", "again").good()
        assert shown.status.startswith("succeeded · 2 ranks")
        _, panel = shown.displays.values()
        assert panel["text/plain"].startswith("log: runs/")
        assert "widget" not in json.dumps(list(shown.displays.values()))
