"""The tables of operators that TPUs lack, and torch's private records of compilations."""

from __future__ import annotations

import inspect

import pytest

from tpunb.backends.torchtpu.gaps import COLLECTIVES, DIFFERENT, OPERATORS, find_gap


@pytest.mark.parametrize("name", [*OPERATORS, *DIFFERENT])
def test_an_entry_is_an_operator_of_torch(name: str) -> None:
    import torch

    assert hasattr(torch.ops.aten, name)


def test_collectives_are_those_that_the_rehearsal_refuses() -> None:
    from tpunb.backends.torchtpu.rehearsal.tpu_dist import MISSING

    assert set(COLLECTIVES) == set(MISSING)


def test_interpolation_to_the_same_size() -> None:
    import torch

    images = torch.zeros(1, 3, 8, 8)
    assert find_gap("aten", "upsample_nearest2d", (images, [8, 8], None, None)) is not None
    assert find_gap("aten", "upsample_nearest2d", (images, [4, 8], None, None)) is None
    assert find_gap("aten", "relu", (images,)) is None
    assert find_gap("other", "mish", (images,)) is None


def test_torchs_records_of_compilations_have_what_is_read() -> None:
    import torch._dynamo.config
    from torch._dynamo import callback, output_graph, utils

    fields = set(utils.CompilationMetrics.__dataclass_fields__)
    assert fields >= {
        *("compile_id", "co_name", "co_filename", "co_firstlineno", "graph_op_count"),
        *("entire_frame_compile_time_s", "recompile_reason", "fail_reason"),
        "fail_user_frame_lineno",
    }
    assert isinstance(utils.graph_break_reasons, list)
    assert {"reason", "user_stack"} <= set(output_graph.GraphCompileReason.__dataclass_fields__)
    assert "compile_id" in inspect.signature(callback.CallbackArgs).parameters
    assert torch._dynamo.config.recompile_limit > 0
