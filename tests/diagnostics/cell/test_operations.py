"""Causes of recompilations: the cause that is found agrees with the difference of the programs."""

from __future__ import annotations

import pytest
import torch

from tpunb.diagnostics.cell.frames import SourceLine
from tpunb.diagnostics.cell.operations import Op, Shape, Window, find_cause

LINE = SourceLine("<cell>", 3)
FLOAT, HALF = torch.float32, torch.bfloat16


def program(*ops: Op) -> Window:
    return Window(ops)


def op(name: str, given: object, result: object = None) -> Op:
    shape = Shape((16, 8), FLOAT, "xla")
    return Op(name, LINE, False, (given,), result or shape)


@pytest.mark.parametrize(
    ("now", "before", "kind"),
    [
        (Shape((1, 8), FLOAT, "cpu"), Shape((1, 8), FLOAT, "xla"), "hidden"),
        (Shape((1, 8), HALF, "xla"), Shape((1, 8), FLOAT, "xla"), "dtype"),
        (Shape((2, 8), FLOAT, "xla"), Shape((1, 8), FLOAT, "xla"), "shape"),
        ("a" * 90 + "x", "a" * 90 + "y", "constant"),
        (1, 2, "constant"),
    ],
)
def test_a_cause_names_two_things_that_differ(now: object, before: object, kind: str) -> None:
    cause = find_cause(program(op("add", now)), program(op("add", before)), frozenset())
    assert cause.kind == kind
    assert kind == "hidden" or cause.now != cause.before
    assert max(len(cause.now), len(cause.before)) <= 40


def test_reading_sizes_is_not_part_of_a_program() -> None:
    tensor = Shape((16, 8), FLOAT, "xla")
    assert op("add", tensor).builds
    assert op("__setitem__", tensor)._replace(result=None).builds
    assert not op("_has_compatible_shallow_copy_type", tensor, True).builds
    assert not op("size", tensor, "torch.Size([16, 8])").builds
    assert not op("to", tensor, tensor).builds
    assert op("to", tensor, Shape((16, 8), HALF, "xla")).builds
