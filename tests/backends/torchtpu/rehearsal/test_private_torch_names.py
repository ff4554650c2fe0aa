"""Private names of torch are declared, and exist."""

from __future__ import annotations

import ast
import functools
import importlib
from pathlib import Path

from tpunb.backends.torchtpu.rehearsal import private_torch_names

PACKAGE = Path(private_torch_names.__file__).parent
OWN = {"_tpu", "_at"}
"""Private attributes that this package itself sets."""


def test_they_exist() -> None:
    import torch

    for module in ("torch._dynamo.backends.registry", "torch._inductor.config"):
        importlib.import_module(module)
    missing = []
    for name in private_torch_names.NAMES:
        try:
            functools.reduce(getattr, name.split(".")[1:], torch)
        except AttributeError:
            missing.append(name)
    assert set(missing) <= private_torch_names.SOME_VERSIONS


def _used(path: Path) -> set[str]:
    """Private attributes that a module reads of something else than itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "seeds"))
    }


def test_no_others_are_used() -> None:
    declared = {part for name in private_torch_names.NAMES for part in name.split(".")}
    operations = {"_to_copy", "_fused_sdp_choice", "_scaled_dot_product_flash_attention_for_cpu"}
    used = {name: path.name for path in PACKAGE.glob("*.py") for name in _used(path)}
    allowed = declared | OWN | operations | {"_getframe", "_extra_reducers"}  # two of Python
    assert {n: where for n, where in used.items() if n not in allowed} == {}
