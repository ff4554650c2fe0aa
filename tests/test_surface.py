"""The public names and signatures: a change here is a change for every user."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import tpunb
from tpunb import training

SURFACE = [
    "RunResult",
    "diagnose",
    "last_run",
    "launch",
    "load",
    "log",
    "on_log",
    "plot",
    "runs",
    "save",
    "scaling",
    "sweep",
    "track",
]
TRAINING = [
    "Accumulation",
    "Buckets",
    "MaskedMean",
    "Position",
    "Throughput",
    "TrainingState",
    "Update",
    "bf16",
    "masked_loss",
    "masked_mean",
    "optimizer_step",
    "pad_images",
    "pad_sequences",
    "predict",
    "shard",
    "training_flops",
    "watch_sums",
]
REMOVED = [
    "FileCache",
    "LoaderCheck",
    "Loading",
    "check_loader",
    "compilations",
    "masked_while",
    "save_weights",
]


pytestmark = pytest.mark.usefixtures("outside_run")


def test_public_names_are_frozen_and_completed() -> None:
    assert sorted(tpunb.__all__) == SURFACE
    assert dir(tpunb) == sorted([*SURFACE, "errors", "training"])
    assert sorted(training.__all__) == dir(training) == TRAINING
    for module in (tpunb, training):
        assert all(hasattr(module, name) for name in dir(module))


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (
            tpunb.log,
            "(step: 'int | None' = None, *, reduce: 'str | Mapping[str, str]' = 'mean', "
            "**values: 'Any') -> 'None'",
        ),
        (
            tpunb.track,
            "(iterable: 'Iterable[T]', total: 'int | None' = None, *, name: 'str' = '') "
            "-> 'Iterator[T]'",
        ),
        (tpunb.on_log, "(callback: 'Callback | None') -> 'Callback | None'"),
        (
            tpunb.save,
            "(state: 'Any', step: 'int', *, per_rank: 'bool' = False, "
            "path: 'str | Path | None' = None) -> 'None'",
        ),
        (
            tpunb.load,
            "(path: 'str | Path | None' = None, *, step: 'int | None' = None, "
            "rank: 'int | None' = None, weights_only: 'bool' = True) -> 'Checkpoint | None'",
        ),
        (
            tpunb.launch,
            "(fn: 'Callable[..., Any]', args: 'Sequence[Any]' = (), *, "
            "cores: 'Cores | None' = None, on: 'str | None' = None, name: 'str | None' = None, "
            "env: 'Mapping[str, str] | None' = None, ranks: 'str' = 'all', "
            "timeout: 'float | str | None' = None, hang_timeout: 'float | str' = 300.0, "
            "grace: 'float | str' = 15.0, retries: 'int' = 0, resume: 'str | None' = None, "
            "raises: 'bool' = True, yes: 'bool' = False, cold: 'bool' = False, "
            "replay: 'bool' = False, replicate: 'bool' = False, profile: 'str | None' = None) "
            "-> 'RunResult'",
        ),
    ],
)
def test_signatures_are_frozen(function: Callable[..., Any], signature: str) -> None:
    assert str(inspect.signature(function)) == signature


@pytest.mark.usefixtures("starts_processes")
def test_importing_the_helpers_does_not_import_torch() -> None:
    code = "import sys, tpunb; dir(tpunb.training); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_old_argument_names_still_work_and_name_the_new_ones(tmp_path: Path) -> None:
    state = {"rate": 1.0}
    with pytest.warns(FutureWarning, match=r"save\(to=\) is now path=") as caught:
        tpunb.save(state, 3, to=tmp_path / "here")  # type: ignore[call-arg]
    assert caught[0].filename == __file__
    with pytest.warns(FutureWarning, match=r"load\(from_=\) is now path="):
        assert tpunb.load(from_=tmp_path / "here")["rate"] == 1.0  # type: ignore[call-arg, index]
    with pytest.warns(FutureWarning, match=r"load\(trusted=\) is now weights_only="):
        tpunb.load(tmp_path / "here", trusted=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="from_ was renamed to path: give only one of them"):
        tpunb.load(path="here", from_="there")  # type: ignore[call-arg]
    with pytest.warns(FutureWarning, match=r"TrainingState\(to=\) is now path="):
        kept = training.TrainingState(model=nn.Linear(1, 1), to="there")
    with pytest.warns(FutureWarning, match=r"TrainingState.load\(from_=\) is now path="):
        assert kept.load(from_="nowhere") == 0  # type: ignore[call-arg]
    with pytest.warns(FutureWarning, match=r"shard\(rest=\) is now remainder="):
        assert training.shard(range(3), 2, rest="drop").remainder == "drop"  # type: ignore[call-arg]


def test_old_trust_is_the_opposite_of_weights_only() -> None:
    tpunb.save({"model": nn.Linear(1, 1)}, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        assert tpunb.load(trusted=True) is not None  # type: ignore[call-arg]
        with pytest.raises(tpunb.errors.CheckpointError, match="weights_only=False"):
            tpunb.load(trusted=False)  # type: ignore[call-arg]


def test_old_names_still_work_and_name_the_new_ones() -> None:
    with pytest.warns(FutureWarning, match=r"tpunb\.compare is now tpunb\.scaling"):
        assert tpunb.compare is tpunb.scaling
    with pytest.warns(FutureWarning, match=r"choose_buckets is now .*Buckets\.choose"):
        assert training.choose_buckets([3], 1, 1) == training.Buckets.choose([3], 1, 1)


@pytest.mark.parametrize("name", REMOVED)
def test_removed_names_say_what_to_use_instead(name: str) -> None:
    message = rf"tpunb\.training\.{name} was removed: use .+"
    with pytest.raises(AttributeError, match=message):
        getattr(training, name)
    with pytest.raises(ImportError, match=message):
        exec(f"from tpunb.training import {name}")


def test_unknown_names_are_attribute_errors() -> None:
    for module in (tpunb, training):
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
            _ = module.nonsense
