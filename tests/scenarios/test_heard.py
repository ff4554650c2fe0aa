"""Clicks in the panel are handled while the cell runs, and no cell runs early because of them.

The test is the front end, on the wire: it sends what JupyterLab and Notebook send when somebody
clicks, to a subshell of ipykernel 7.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.kernel import PATIENCE, Kernel, kernel
from tests.runs.test_listing import made

pytestmark = pytest.mark.usefixtures("starts_processes")

WATCH = """import time
from pathlib import Path
from tpunb.display.front_end import ReplacedOutput
from tpunb.kernel import panel
from tpunb.runs import state
from tpunb.runs.directory import RunDir

run = RunDir(Path({folder!r}))
with panel.open_panel(state.read_spec(run), run, ReplacedOutput()) as watched:
    while not Path("go on").exists():
        watched.tick()
        time.sleep(0.02)
{end}"""


class Page:
    """The widgets of a page, and a hand that clicks."""

    def __init__(self, nb: Kernel) -> None:
        self.nb = nb
        self.open: dict[str, dict[str, Any]] = {}
        """The state of each widget that is open, by its comm."""
        self.idle: list[str] = []
        """The requests that have been answered, in their order."""
        self.texts: list[str] = []
        features = nb.client.kernel_info(reply=True, timeout=PATIENCE)["content"].get(
            "supported_features", []
        )
        self.subshell = self._subshell() if "kernel subshells" in features else None

    def _subshell(self) -> str:
        client = self.nb.client
        client.control_channel.send(client.session.msg("create_subshell_request", {}))
        reply = client.get_control_msg(timeout=PATIENCE)
        return str(reply["content"]["subshell_id"])

    def say(self, comm: str, **state: Any) -> str:
        """What a person has changed; the id of the message."""
        data = {"method": "update", "state": state, "buffer_paths": []}
        content = {"comm_id": comm, "data": data}
        message = self.nb.client.session.msg("comm_msg", content)
        if self.subshell is not None:
            message["header"]["subshell_id"] = self.subshell
        self.nb.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def messages(self, until: str) -> Iterator[dict[str, Any]]:
        """What the kernel tells, each taken in already. Fails if it is not the end in time."""
        deadline = time.monotonic() + PATIENCE
        while True:
            assert time.monotonic() < deadline, f"waited in vain: {until}"
            try:
                message = self.nb.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            self._take(message["msg_type"], message["content"], message["parent_header"])
            yield message

    def _take(self, kind: str, content: dict[str, Any], parent: dict[str, Any]) -> None:
        if kind == "comm_open":
            self.open[content["comm_id"]] = content["data"]["state"]
        elif kind == "comm_msg" and content["data"].get("method") == "update":
            self.open[content["comm_id"]].update(content["data"]["state"])
        elif kind == "comm_close":
            del self.open[content["comm_id"]]
        elif kind == "stream":
            self.texts.append(content["text"])
        elif kind == "status" and content["execution_state"] == "idle":
            self.idle.append(parent["msg_id"])

    def panel(self) -> list[dict[str, Any]]:
        """Answer what is asked, as every page does, until the panel is shown; what was told."""
        told = []
        for message in self.messages("the panel"):
            told.append(message)
            content = message["content"]
            if message["msg_type"] == "comm_open":
                state = content["data"]["state"]
                if (state["_model_name"], state.get("value")) == ("IntTextModel", 0):
                    self.say(content["comm_id"], value=1)
            view = content.get("data", {}).get("application/vnd.jupyter.widget-view+json")
            if message["msg_type"] in ("display_data", "update_display_data") and view:
                break
        return told

    def prints(self, words: str) -> None:
        """Wait until these are among what stands below the cell, if they are not."""
        messages = self.messages(f"{words!r} below the cell")
        while not any(words in text for text in self.texts):
            next(messages)

    def comm(self, model: str) -> str:
        """The comm of the one widget of a kind."""
        [found] = [one for one, state in self.open.items() if state["_model_name"] == model]
        return found

    def ranks(self) -> str:
        """The comm of the list of ranks."""
        lists = {one: state.get("_options_labels", ()) for one, state in self.open.items()}
        [found] = [one for one, labels in lists.items() if "all ranks" in labels]
        return found

    def widgets(self) -> list[str]:
        """The kinds that are open, but for what belongs to others."""
        kinds = (str(state["_model_name"]) for state in self.open.values())
        return sorted(kind for kind in kinds if not kind.endswith(("LayoutModel", "StyleModel")))

    def shows(self, text: str) -> None:
        """Wait for the log of a tab."""
        for _ in self.messages(text):
            if any(text in str(state.get("value")) for state in self.open.values()):
                return


@pytest.mark.parametrize("fails", [True, False])
def test_panel_click_is_handled_while_the_cell_runs_in_cell_order(
    fails: bool, tmp_path: Path
) -> None:
    run = made(tmp_path, "x")
    run.log.write_text("[0] a\n[1] b\n")
    end = "raise ValueError('failed')" if fails else "print('watched')"
    with kernel(tmp_path) as nb:
        nb.run("import ipywidgets", "setup").good()
        page = Page(nb)
        watch = nb.send(WATCH.format(folder=str(run.path), end=end), "watch")
        below = [nb.send(f"print('cell {n}')", f"below-{n}") for n in (1, 2)]
        page.panel()
        page.shows("nothing is logged yet")
        page.say(page.comm("TabModel"), selected_index=1)
        page.shows("[0] a\n[1] b</pre>")
        click = page.say(page.ranks(), index=2)
        page.shows(">[1] b</pre>")
        told = page.messages("the click was dealt with")
        while click not in page.idle:
            next(told)
        assert watch.message not in page.idle
        (tmp_path / "go on").touch()
        for _ in page.messages("the end"):
            if below[-1].message in page.idle:
                break
        replies = [nb.client._recv_reply(ran.message, timeout=PATIENCE) for ran in below]
        assert [reply["content"]["status"] for reply in replies] == [
            "aborted" if fails else "ok"
        ] * 2
        printed = "".join(page.texts).split("\n")
        assert [line for line in printed if line] == (
            [] if fails else ["watched", "cell 1", "cell 2"]
        )
        # What a page that is opened again asks for is kept, and nothing else.
        assert page.widgets() == ["HTMLModel", "VBoxModel"]
        # The page was told that the click was dealt with, or it would not send the next.
        order = [name for name in page.idle if name in (click, watch.message, below[0].message)]
        assert order == [click, watch.message, below[0].message]
