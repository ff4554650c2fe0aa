"""`tpunb node` before anything runs; tests of whole runs are in tests/scenarios."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tpunb.kernel import node
from tpunb.kernel.node import Input, Node, NodeOrder, NodeOutput, follow_node
from tpunb.machine.machine import detect_machine
from tpunb.runs import stream
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunSpec
from tpunb.runs.stream import End, Stop
from tpunb.utils.version import installed_versions

Make = Callable[..., Node]


@pytest.fixture
def said() -> io.BytesIO:
    return io.BytesIO()


@pytest.fixture
def make(tmp_path: Path, said: io.BytesIO) -> Iterator[Make]:
    """A node whose standard input holds these lines."""
    ends: list[int] = []

    def make(*lines: stream.Line) -> Node:
        reading, writing = os.pipe()
        for line in lines:
            os.write(writing, stream.encode(line))
        os.close(writing)
        ends.append(reading)
        order = NodeOrder(tmp_path, stdin=Input(reading), stdout=said)
        run = RunDir(tmp_path)
        run.script.write_text("print(1)\n")
        return Node(order, NodeOutput(said))

    yield make
    for end in ends:
        os.close(end)


def spec(**values: object) -> RunSpec:
    return RunSpec("id", "n", 2, "CPU", "~/nets", ("src", "/lib"), (), **values)  # type: ignore[arg-type]


def test_the_spec_gets_this_hosts_paths(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    made = make()._localized(spec(hosts=("h0", "h1")))
    assert made.cwd == "/home/ann/nets"
    assert made.sys_path[:3] == ("", "/home/ann/nets/src", "/lib")
    assert any("site-packages" in entry for entry in made.sys_path)
    assert make().run_dir.read_spec() == made


def test_an_error_is_the_last_line_of_the_stream(make: Make, said: io.BytesIO) -> None:
    assert node.run_node(make(Stop())._order) == node.REFUSED
    end = stream.decode(said.getvalue())
    assert end == End(node.REFUSED, "the first line of standard input does not start a run")


def test_facts_contain_everything_that_must_be_the_same(make: Make) -> None:
    run = make().run_dir
    found = node.facts(run, spec(hosts=("h0", "h1")), detect_machine({}))
    assert found["ranks on each host"] == "1"
    assert found["torch"] == installed_versions()["torch"]
    before = found["the script"]
    run.script.write_text("print(2)\n")
    assert node.facts(run, spec(), detect_machine({}))["the script"] != before


def test_spec_file_is_private_to_the_user(make: Make, tmp_path: Path) -> None:
    make()._localized(spec(hosts=("h0", "h1")))
    assert stat.S_IMODE((tmp_path / "spec.json").stat().st_mode) == 0o600


def test_input_returns_an_incomplete_last_line() -> None:
    read, write = os.pipe()
    os.write(write, b"whole\nhal")
    os.close(write)
    lines = Input(read)
    assert [lines.line(), lines.line(), lines.line()] == [b"whole", b"hal", b""]
    os.close(read)


def test_attach_process_ends_with_its_caller_and_the_run_continues(
    tmp_path: Path, said: io.BytesIO
) -> None:
    """The run continues, and no process or file is left for each lost connection."""
    run = RunDir(tmp_path)
    run.write_spec(spec())
    lock = run.take_lock()
    assert lock is not None
    read, write = os.pipe()
    os.write(write, b"{}\n")
    os.close(write)
    assert follow_node(NodeOrder(run.path, stdin=Input(read), stdout=said)) == 0
    assert run.is_running()
    lock.close()
    os.close(read)
