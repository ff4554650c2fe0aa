"""The facts behind rules hold for the installed torch and torch_xla, without a TPU."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tpunb.notebook.lint.linter import RULES

FACTS = {
    "nprocs": "ValueError: Unsupported nprocs (8)",
    "device-before-ranks": "RuntimeError: Runtime is already initialized.",
    "device-number": "IndexError",
    "cuda-amp": "torch.float32",
    "fused-optimizer": "RuntimeError: `fused=True` requires all the params",
    "compile-backend": "InductorError: KeyError: 'xla'",
    "sampler-and-shuffle": "ValueError: sampler option is mutually exclusive with shuffle",
    "torch-save-on-xla": "xla:0",
    "load-to-xla": "RuntimeError: don't know how to restore data location",
    "torch-checkpoint": "AttributeError: module 'torch' has no attribute 'xla'",
}


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.skipif(find_spec("torch_xla") is None, reason="needs torch_xla")
def test_torch_and_torch_xla_do_what_the_rules_say() -> None:
    script = Path(__file__).parents[1] / "notebook/lint/facts.py"
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    facts = json.loads(run.stdout.splitlines()[-1])
    for rule, start in FACTS.items():
        assert rule in RULES
        assert facts[rule].startswith(start), rule
    assert facts["cuda-call"] != "no error"
    assert facts["cuda-bfloat16"].startswith("RuntimeError: Current CUDA Device does not support")
    assert facts["data-parallel"] == []
    assert facts["optimizer-before-device"] == ["cpu", "xla", False]
    assert facts["torch-checkpoint without reentry"] == facts["torch-checkpoint"]
    assert facts["checkpoint of torch_xla"] == "no error"
    assert facts["changing-shape"] == [4]
    assert facts["missing"] == ["get_ordinal", "xrt_world_size"]
