"""The facts behind rules hold for the installed torch and torch_xla, without a TPU."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.skipif(find_spec("torch_xla") is None, reason="needs torch_xla")
def test_torch_and_torch_xla_do_what_the_rules_say() -> None:
    script = Path(__file__).parents[1] / "notebook/lint/facts.py"
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    facts = json.loads(run.stdout.splitlines()[-1])
    assert facts["torch-save-on-xla"] == "xla:0"
    assert facts["optimizer-before-device"] == ["cpu", "xla", False]
    assert facts["changing-shape"] == [4]
