"""The public names and signatures: a change here is a change for every user."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

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
            "(fn: 'Callable[..., Any]', args: 'Sequence[Any]' = (), "
            "kwargs: 'Mapping[str, Any] | None' = None, *, on_log: 'Callback | None' = None, "
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


def test_unknown_names_are_attribute_errors() -> None:
    for module in (tpunb, training):
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
            _ = module.nonsense
