"""torch.compile: the backend by the inputs, static shapes, and what a TPU's compiler refuses."""

from __future__ import annotations

from typing import Any

import pytest


def test_graphs_of_the_device() -> None:
    import torch
    from torch._dynamo.utils import counters

    def double(x: Any) -> Any:
        return (x @ x).relu() * 2

    compiled = torch.compile(double)
    before = counters["stats"]["unique_graphs"]
    for size in (2, 2, 3):
        x = torch.ones(size, size, device="tpu", requires_grad=True)
        compiled(x).sum().backward()
        assert x.grad is not None
        assert torch.equal(compiled(x), double(x))
    assert counters["stats"]["unique_graphs"] - before == 2  # a graph for each shape
    assert torch.compile(double, backend="eager")(torch.ones(2, 2)).tolist() == [[4, 4], [4, 4]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's import
@pytest.mark.parametrize(
    ("options", "error"),
    [({"mode": "max-autotune"}, TypeError), ({"backend": "inductor"}, RuntimeError)],
)
def test_options_that_a_tpu_refuses(options: dict[str, str], error: type[Exception]) -> None:
    import torch
    from torch._dynamo.exc import BackendCompilerFailed

    compiled: Any = torch.compile(lambda x: x + 1, **options)  # type: ignore[call-overload]
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(torch.ones(2, device="tpu"))
    assert type(caught.value.inner_exception) is error
