"""Answers name the library that makes the call, the name that was meant, and where it happened."""

from __future__ import annotations

from importlib import metadata

import pytest

from tpunb.diagnostics.failure import Diagnosis, Facts, diagnose
from tpunb.diagnostics.failure.details import explain_name, names_of
from tpunb.diagnostics.failure.log import Log
from tpunb.diagnostics.failure.origin import version_of

SITE = "/usr/lib/python3.11/site-packages"


def log(error: str, *frames: str, listed: str = "") -> str:
    lines = [f"{frame}\n    call()" for frame in frames]
    return "\n".join([listed, "Traceback (most recent call last):", *lines, f"{error}\n"])


def library(path: str, line: int = 7) -> str:
    return f'  File "{SITE}/{path}", line {line}, in f'


CELL = "  cell [3], line 8, in <module>"
WEIGHTS = "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded"


def best(text: str, facts: Facts | None = None) -> Diagnosis:
    return diagnose(text, 1, facts=facts)[0]


def test_a_call_inside_a_library_gets_a_fix_for_the_library() -> None:
    frames = [CELL, library("transformers/trainer.py", 2122), library("torch/serialization.py")]
    found = best(log(WEIGHTS, *frames, listed="transformers==4.51.3"))
    assert found.id == "weights-only-load"
    assert found.cause.endswith(
        "transformers 4.51.3 makes the call (transformers/trainer.py, line 2122), not your code."
    )
    assert found.steps == ("Upgrade transformers to 4.52 or later.",)
    other = best(log(WEIGHTS, CELL, library("mylib/load.py"), library("torch/serialization.py")))
    assert other.fix.startswith("Upgrade mylib, or save its checkpoint again")


@pytest.mark.parametrize(
    "frames",
    [
        [CELL, library("torch/serialization.py")],
        # a library that calls the user's function
        [CELL, library("lightning/trainer.py"), CELL, library("torch/serialization.py")],
        ['  File "train.py", line 3, in load', library("torch/serialization.py")],
        [],
    ],
)
def test_a_call_of_ones_own_gets_a_fix_for_it(frames: list[str]) -> None:
    found = best(log(WEIGHTS, *frames))
    assert "weights_only=False" in found.steps[0]
    assert "not your code" not in found.cause


def test_removed_names_called_by_a_library_name_both() -> None:
    error = "AttributeError: module 'torch_xla.core.xla_model' has no attribute 'xrt_world_size'"
    found = best(log(error, CELL, library("ignite/distributed/xla.py")))
    assert found.id == "api-removed"
    assert found.cause.startswith("torch_xla no longer has `torch_xla.core.xla_model.xrt_world")
    assert "ignite makes the call" in found.cause
    assert found.fix.startswith("Upgrade ignite.")
    assert found.link == ""


@pytest.mark.parametrize(
    ("message", "cause", "fix"),
    [
        (
            "AttributeError: module 'torch_xla' has no attribute 'synk'",
            "`torch_xla` has no `synk`. Did you mean `sync`?",
            "Write `torch_xla.sync`.",
        ),
        (
            "ImportError: cannot import name 'wold_size' from 'torch_xla.runtime' (/a/runtime.py)",
            "`torch_xla.runtime` has no `wold_size`. Did you mean `world_size`?",
            "Write `torch_xla.runtime.world_size`.",
        ),
        (
            "AttributeError: module 'torch_xla.core.xla_model' has no attribute 'get_ordinal'",
            "torch_xla no longer has `torch_xla.core.xla_model.get_ordinal`.",
            "Write `torch_xla.runtime.global_ordinal()`.",
        ),
        (
            "ModuleNotFoundError: No module named 'torch_xla.experimental.pjrt'",
            "torch_xla no longer has `torch_xla.experimental.pjrt`.",
            "Import `torch_xla.runtime`.",
        ),
    ],
)
def test_a_name_that_torch_xla_does_not_have(message: str, cause: str, fix: str) -> None:
    found = best(log(message, CELL))
    assert (found.cause, found.fix, found.link) == (cause, fix, "")


@pytest.mark.parametrize(
    "message",
    [
        "module 'torch_xla' has no attribute 'sync'",  # the log is of an older release
        "module 'torch_xla' has no attribute 'qqqqqqqq'",
        "module 'numpy' has no attribute 'meen'",
        "No module named 'torch_xla.no_such_module'",
    ],
)
def test_a_name_without_a_likely_meaning_is_not_guessed(message: str) -> None:
    assert explain_name(message) is None


def test_names_are_read_without_importing_the_module() -> None:
    assert {"sync", "device", "launch"} <= names_of("torch_xla")
    assert {"optimizer_step", "all_reduce"} <= names_of("torch_xla.core.xla_model")
    assert names_of("torch_xla.no_such_module") == names_of("no_such_package_at_all") == set()


@pytest.mark.parametrize(
    "line",
    [
        "datasets==3.1.0",
        "- `datasets` version: 3.1.0",
        "datasets                 3.1.0",
        "Successfully installed datasets-3.1.0 pyarrow-17.0.0",
        "\t- datasets:       3.1.0",
        "Requirement already satisfied: datasets in /a/b (3.1.0)",
    ],
)
def test_the_version_is_the_one_that_the_log_names(line: str) -> None:
    found = version_of("datasets", Log(f"step 1.5\n{line}\n"), here=False)
    assert found == ("3.1.0" if "/a/b" not in line else None)


def test_versions_of_this_environment_are_known_for_its_own_runs() -> None:
    assert version_of("torch_xla", Log("step"), here=True) == metadata.version("torch_xla")
    assert version_of("torch_xla", Log("step"), here=False) is None
    assert version_of("no_such_package", Log("step"), here=True) is None


ARGUMENT = "TypeError: Accelerator.unwrap_model() got an unexpected keyword argument 'keep'"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (log(ARGUMENT, CELL, library("transformers/trainer.py")).replace("call()", "f(keep=1)"), 1),
        (log(ARGUMENT, CELL, library("transformers/trainer.py")), 0),  # passed through: f(**kwargs)
        (log(ARGUMENT, library("transformers/trainer.py"), CELL).replace("call()", "f(keep=1)"), 0),
        (ARGUMENT, 0),
    ],
)
def test_a_librarys_own_line_is_told_from_a_call_of_ones_own(text: str, found: int) -> None:
    assert [one.id for one in diagnose(text, 1)] == ["library-release"] * found
    if found:
        assert "transformers makes the call" in best(text).cause
