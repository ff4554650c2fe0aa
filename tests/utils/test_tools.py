"""Tools that are broken, hang, or print anything without an end: each call ends and says why."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.kernel import until
from tpunb.utils import tools
from tpunb.utils.interrupts import counted_interrupts
from tpunb.utils.tools import StoppedError, ToolError, ToolProblem

NOT_STARTED, FAILED, MISSING = ToolProblem.NOT_STARTED, ToolProblem.FAILED, ToolProblem.MISSING


def tool(folder: Path, script: str, mode: int = 0o700, name: str = "tool") -> str:
    path = folder / name
    path.write_text(script)
    path.chmod(mode)
    return str(path)


def problem(command: list[str], **options: Any) -> tuple[ToolProblem, str]:
    with pytest.raises(ToolError) as caught:
        tools.call(command, **options)
    return caught.value.problem, str(caught.value)


@pytest.mark.usefixtures("starts_processes")
def test_input_and_output_of_any_size_and_bytes(tmp_path: Path) -> None:
    much = "\u00fc\n" * 1_000_000
    assert tools.call(["cat"], given=much.encode()) == much
    path = tool(
        tmp_path, "#!/bin/sh\nprintf 'a\\377\\033]0;title\\007b\\033[31mc\\r\\n\\td'; exec >&-\n"
    )
    assert tools.call([path], given=b"never read" * 100_000) == "a\ufffdbc\n\td"


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("stream", ["", " >&2"])
def test_output_without_an_end_is_cut_off(
    tmp_path: Path, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "MOST", 100_000)
    path = tool(tmp_path, f"#!/bin/sh\nwhile :; do echo so it goes{stream}; done\n")
    found, told = problem([path], shown="tool x")
    assert found is ToolProblem.TOO_LONG
    assert told.startswith("`tool x` has printed more than 0.1 MB")
    assert "so it goes" in told


@pytest.mark.usefixtures("starts_processes")
def test_a_tool_that_hangs_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = (
        f"#!/bin/sh\necho waiting for the network >&2\nsleep 1000 &\necho $! $$ > {pids}\nwait\n"
    )
    found, told = problem([tool(tmp_path, script)], shown="tool", timeout=1.0)
    assert found is ToolProblem.SILENT
    assert told == "`tool` has not answered in 1 s. It has printed waiting for the network"
    for pid in map(int, pids.read_text().split()):
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "it is gone")
    silent = tool(tmp_path, "#!/bin/sh\nexec >&- 2>&-\nexec sleep 1000\n", name="silent")
    assert problem([silent], timeout=0.5)[0] is ToolProblem.SILENT


@pytest.mark.usefixtures("starts_processes")
def test_a_process_that_a_tool_leaves_is_not_waited_for(tmp_path: Path) -> None:
    path = tool(tmp_path, f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/left\necho done\n")
    assert tools.call([path]) == "done\n"
    os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize(
    ("script", "mode", "found", "told"),
    [
        ("#!/bin/sh\n", 0o600, NOT_STARTED, "`tool` cannot be executed: Permission denied"),
        ("no script", 0o700, NOT_STARTED, "`tool` cannot be executed: Exec format error"),
        ("#!/nowhere/sh\n", 0o700, MISSING, "`tool` is not installed, or not on PATH"),
        ("#!/bin/sh\nexit 3\n", 0o700, FAILED, "`it` failed: exit code 3"),
        ("#!/bin/sh\nkill -9 $$\n", 0o700, FAILED, "`it` failed: it was ended by SIGKILL"),
        ("#!/bin/sh\necho no >&2; exit 1", 0o700, FAILED, "`it` failed: no"),
        ("#!/bin/sh\necho no; exit 1", 0o700, FAILED, "`it` failed: no"),
    ],
)  # fmt: skip
def test_a_tool_that_cannot_do_it(
    tmp_path: Path, script: str, mode: int, found: ToolProblem, told: str
) -> None:
    assert problem([tool(tmp_path, script, mode)], shown="it") == (found, told)


@pytest.mark.usefixtures("starts_processes")
def test_the_interrupt_key_ends_a_call_where_presses_are_counted(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    path = tool(tmp_path, f"#!/bin/sh\ntrap '' INT\n: > {begun}\nsleep 1000\n")

    def press() -> None:
        until(begun.exists, "the tool has begun")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press)
    with counted_interrupts() as pressed:
        presser.start()
        with pytest.raises(StoppedError):
            tools.call([path])
        presser.join()
        assert pressed.count == 1
        assert tools.call(["echo", "the next one runs"]) == "the next one runs\n"
    begun.unlink()
    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        tools.call([path])
    presser.join()
    with pytest.raises(StoppedError):
        tools.call([path], cancelled=lambda: True)


@dataclass(frozen=True)
class Node:
    state: str | None = None
    hosts: tuple[Mapping[str, Any], ...] | None = None


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "[]", "3", '"x"', "{", "[" * 100_000, '{"a":' * 100_000, "There are updates",
        '{"state": 3}', '{"hosts": {}}', '{"hosts": [1]}', "NaN", "\ufffd", "{}{}",
    ],
)  # fmt: skip
def test_output_of_another_form_is_quoted(text: str) -> None:
    with pytest.raises(ToolError, match="the output of `tool x` cannot be read") as caught:
        tools.read_json(Node, text, "tool x")
    assert caught.value.problem is ToolProblem.UNREADABLE
    assert (text[:20] or "nothing") in str(caught.value)
    assert len(str(caught.value)) < 1200


def test_strings_in_json_control_no_terminal() -> None:
    text = r'{"state": "READY\u001b]0;mine\u0007\u009b2J", "hosts": [{"a\u001b[A": "\ud800\r"}]}'
    assert tools.read_json(Node, text, "tool") == Node("READY", ({"a": "?"},))
