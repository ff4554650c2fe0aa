"""The operations of torch's own database give the same on the device as on the CPU.

Forward, gradients, in place and with `out=`. Here some of them; all: tests/long.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.torchtpu.rehearsal import operations

SPARSE = "tensors that are not dense are refused"
LAYOUT = "the sample reads memory around a view, which .to() does not copy"
ON_CPU = "the sample asks for a result on the CPU"
INDICES = "torch itself wants the indices on the CPU"
GROWS = "the CPU's kernel makes its own input larger, which an alias cannot be"

ALL = ("float32", "float64", "bfloat16", "complex64")
EXCEPTIONS: dict[operations.Variant, dict[str, tuple[str, tuple[str, ...]]]] = {
    "call": {
        "sparse.sampled_addmm": (SPARSE, ALL),
        "sparse.mm.reduce": (SPARSE, ALL),
        "to_sparse": (SPARSE, ALL[:3]),
        "as_strided.partial_views": (LAYOUT, ALL),
        "to": (ON_CPU, ALL),
        "tensor_split": (INDICES, ALL),
    },
    "inplace": {"addbmm": (GROWS, ALL)},
    "out": {"sparse.sampled_addmm": (SPARSE, ALL)},
}
"""By what is called: operations that differ, why, and in which types, where they have them."""
EACH = 32
"""One of so many operations is run here, and each that differs."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(dtype_name: str, variant: operations.Variant, samples: int, each: int) -> None:
    import torch

    dtype = getattr(torch, dtype_name)
    table = EXCEPTIONS[variant]
    exceptions = {name for name, (_, types) in table.items() if dtype_name in types}
    every = {operations.name_of(op): op for op in operations.database(dtype)}
    chosen = {*list(every)[::each], *exceptions.intersection(every)}
    differ = {name: operations.difference(every[name], dtype, variant, samples) for name in chosen}
    found = {name: text for name, text in differ.items() if text is not None}
    assert not {name: text for name, text in found.items() if name not in exceptions}
    assert exceptions.intersection(every) == set(found), "some are the same now: remove them"
    assert len(found) <= 0.03 * len(every)


@pytest.mark.usefixtures("starts_processes", "one_thread")  # torch's tests look for compilers
@pytest.mark.parametrize("variant", EXCEPTIONS)
@pytest.mark.parametrize("dtype", ALL)
def test_operations_are_the_same(dtype: str, variant: operations.Variant) -> None:
    check(dtype, variant, samples=3, each=EACH)
