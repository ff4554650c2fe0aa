"""A run keeps nothing alive on other Pythons either: frames keep other things on each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import matrix
from tests.drivers import lifetimes

TORCH = {"3.10": "2.8.0", "3.12": "2.9.0", "3.13": "2.9.0"}


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.timeout(3600)  # torch is brought for each
@pytest.mark.parametrize("version", TORCH)
def test_nothing_lives_longer_in_a_run_on_another_python(version: str, tmp_path: Path) -> None:
    packages = [f"torch=={TORCH[version]}", f"torch_xla=={TORCH[version]}"]
    environment = matrix.Environment(version, lambda _: packages, together=True)
    wheel = matrix.build_wheel(tmp_path)
    python, _ = matrix.make(environment, tmp_path / "venv", wheel, None)
    for backend in ("xla", "torch"):
        (folder := tmp_path / backend).mkdir()
        for where, cases in lifetimes.seen(backend, folder, python).items():
            longer = {case: found for case, found in cases.items() if found}
            assert longer == {}, f"{backend}, {where}"
