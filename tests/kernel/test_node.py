"""`tpunb node` before anything runs; tests of whole runs are in tests/scenarios."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.metadata import FakeMetadataServer
from tpunb.kernel import node
from tpunb.kernel.node import Input, Node, NodeOrder, NodeOutput, follow_node
from tpunb.machine.hosts import Identity
from tpunb.machine.machine import detect_machine
from tpunb.runs import stream
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunSpec
from tpunb.runs.stream import End, Start, Stop
from tpunb.utils.errors import SetupError, TpunbError
from tpunb.utils.version import installed_versions

KEY = "ab" * 32
TWO = Identity(2, 1, "10.0.0.2", 29477, "flags", (), "10.0.0.3")

Make = Callable[..., Node]


@pytest.fixture
def said() -> io.BytesIO:
    return io.BytesIO()


@pytest.fixture
def make(tmp_path: Path, said: io.BytesIO) -> Iterator[Make]:
    """A node whose standard input holds these lines."""
    ends: list[int] = []

    def make(*lines: stream.Line, **options: object) -> Node:
        reading, writing = os.pipe()
        for line in lines:
            os.write(writing, stream.encode(line))
        os.close(writing)
        ends.append(reading)
        order = NodeOrder(tmp_path, stdin=Input(reading), stdout=said, **options)  # type: ignore[arg-type]
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
    made = make()._localized(spec(hosts=("h0", "h1")), TWO)
    assert made.cwd == "/home/ann/nets"
    assert made.sys_path[:3] == ("", "/home/ann/nets/src", "/lib")
    assert any("site-packages" in entry for entry in made.sys_path)
    assert make().run_dir.read_spec() == made


def test_hosts_without_names_are_numbered(make: Make) -> None:
    made = make()._localized(spec(), TWO)
    assert (made.hosts, made.world_size) == (("host-0", "host-1"), 4)
    named = replace(TWO, hosts=("t-0.t", "t-1.t"))
    assert make()._localized(spec(), named).hosts == ("t-0.t", "t-1.t")


def test_a_run_for_other_hosts_is_refused(make: Make) -> None:
    with pytest.raises(SetupError, match=r"is for 3 hosts .*, but according to flags there are 2"):
        make()._localized(replace(spec(), hosts=("a", "b", "c"), world_size=3), TWO)


class TestKey:
    def test_key_from_the_first_line_of_standard_input(self, make: Make) -> None:
        made = make(Start(KEY, {"TOKEN": "x"}), key_file="-")
        started = made._read_start()
        assert started == Start(KEY, {"TOKEN": "x"})
        assert made._key(started, TWO) == KEY

    def test_key_from_a_file(self, make: Make, tmp_path: Path) -> None:
        (tmp_path / "key").write_text(f"{KEY}\n")
        assert make(key_file=str(tmp_path / "key"))._key(None, TWO) == KEY

    @pytest.mark.parametrize("key", ["", "short", "abcd", "zz" * 32])
    def test_key_that_is_too_short_is_refused_for_several_hosts(
        self, make: Make, tmp_path: Path, key: str
    ) -> None:
        (tmp_path / "key").write_text(key)
        with pytest.raises(SetupError, match="at least 32 hexadecimal digits"):
            make(key_file=str(tmp_path / "key"))._key(None, TWO)

    def test_key_is_generated_for_a_single_host(self, make: Make) -> None:
        assert len(make()._key(None, replace(TWO, nnodes=1, node_rank=0))) == 64

    def test_first_line_of_standard_input_that_is_not_a_message(self, make: Make) -> None:
        with pytest.raises(TpunbError, match="the first line of standard input does not contain"):
            make(Stop(), key_file="-")._read_start()


def test_with_a_stream_an_error_is_the_last_line(make: Make, said: io.BytesIO) -> None:
    order = make(key_file="-", stream=True)._order
    assert node.run_node(order) == node.REFUSED
    end = stream.decode(said.getvalue())
    assert isinstance(end, End)
    assert end.returncode == node.REFUSED
    assert "does not contain the key" in end.message


def test_facts_contain_everything_that_must_be_the_same(make: Make) -> None:
    run = make().run_dir
    found = node.facts(run, spec(hosts=("h0", "h1")), detect_machine({}))
    assert found["ranks on each host"] == "1"
    assert found["torch"] == installed_versions()["torch"]
    before = found["the script"]
    run.script.write_text("print(2)\n")
    assert node.facts(run, spec(), detect_machine({}))["the script"] != before


def test_the_metadata_server_is_queried_only_if_no_other_source_has_the_value(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeMetadataServer({}) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.host)
        made = make(nnodes=2, node_rank=1, rendezvous="127.0.0.1:1", address="127.0.0.1")
        assert made._identify().node_rank == 1
        assert server.asked == []


def test_spec_file_is_private_to_the_user(make: Make, tmp_path: Path) -> None:
    make()._localized(spec(hosts=("h0", "h1")), TWO)
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
    order = NodeOrder(run.path, stream=True, stdin=Input(read), stdout=said)
    assert follow_node(run, "-", order) == 0
    assert run.is_running()
    lock.close()
    os.close(read)
