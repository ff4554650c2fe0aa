"""`tpunb.launch` in processes that start no run, and the line of its call in a cell."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
from IPython.core.error import UsageError

import tpunb
from tpunb.backends import launchers
from tpunb.errors import TpunbError
from tpunb.kernel import launch as module
from tpunb.kernel.launch import cell_line
from tpunb.kernel.options import LaunchOptions, TrainOptions
from tpunb.utils.options import declarations


@pytest.mark.parametrize(
    ("source", "lines", "line"),
    [
        ("a\nlaunch()", [2], 2),
        ("\n  \na\nlaunch()", [2], 4),
        ("%%time\na\nlaunch()", [1, 2], 3),
        ("%%time\n%%capture out\na\nlaunch()", [1, 1, 2], 4),
        ("a\n%time launch()", [2, 1], 2),
    ],
)
def test_line_of_a_call_within_its_cell(source: str, lines: list[int], line: int) -> None:
    assert cell_line(source, lines) == line


def test_launch_options_match_those_of_a_train_cell() -> None:
    """All options but those for cells only; this fails for a new option until it is decided."""
    for_cells = {"returns", "out", "dry_run", "background", "detach", "stop_when_done", "idle"}
    declared = {item.name for item, _ in declarations(TrainOptions)} - for_cells
    arguments = set(inspect.signature(tpunb.launch).parameters) - {"fn", "args", "kwargs", "on_log"}
    assert arguments - {"raises"} == declared - {"no_raise"}


def test_launch_defaults_match_those_of_a_train_cell() -> None:
    parameters = inspect.signature(tpunb.launch).parameters
    for item, _ in declarations(TrainOptions):
        if item.name in parameters and item.name != "env":
            assert parameters[item.name].default == item.default, item.name


def test_options_are_read_as_in_an_option_line() -> None:
    options = module._options(cores=4, timeout="5m", grace=2, retries=1, profile="0:1-2")
    assert isinstance(options, LaunchOptions)
    assert (options.cores, options.timeout, options.grace) == (4, 300.0, 2.0)
    assert (options.retries, options.returns, options.hang_timeout) == (1, ("value",), 300.0)
    assert options.profile is not None
    with pytest.raises(UsageError, match=r"tpunb.launch\(cores=\): '0' is not a number of cores"):
        module._options(cores=0)
    with pytest.raises(UsageError, match=r"tpunb.launch\(timeout=\): 'soon' is not a duration"):
        module._options(timeout="soon")


@pytest.mark.parametrize("name", ["", "A=B"])
def test_names_of_variables_are_checked(name: str) -> None:
    with pytest.raises(UsageError, match=r"tpunb.launch\(env=\): .* is not a valid variable name"):
        module._options(env={name: "1"})
    assert module._options(env={"A": 1, "B": "x=y"}).env == (("A", "1"), ("B", "x=y"))


@pytest.mark.usefixtures("outside_run")
class TestInAProcessThatIsOneCore:
    def test_launch_in_a_script_calls_the_function(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        result = tpunb.launch(lambda x: x + 1, args=(1,), name="sum", cores=4)
        assert (result.state, result.name, result.world_size) == ("succeeded", "sum", 1)
        assert (result.returns, result.dir) == ({"value": 2}, Path.cwd())
        assert capsys.readouterr().out == "cores=4 is ignored: 1 rank runs\n"

    def test_launch_in_a_rank_calls_the_function(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for name, value in {"TPUNB_RUN": str(tmp_path), "RANK": "1", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        with launchers.calling_here(1):
            result = tpunb.launch(os.getpid, cores=3)
        assert (result.returns["value"], result.world_size) == (os.getpid(), 2)
        assert result.dir == tmp_path

    def test_launch_in_a_prelude_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("TPUNB_RUN", str(tmp_path))
        with pytest.raises(TpunbError, match="called in the prelude of a run, which cannot"):
            tpunb.launch(os.getpid)
