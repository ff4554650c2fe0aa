"""All operations of torch's own database: the same on the rehearsed device as on the CPU."""

from __future__ import annotations

import pytest

from tests.backends.torchtpu.rehearsal import operations
from tests.backends.torchtpu.rehearsal.test_kernels_op_db import ALL, EXCEPTIONS, check, one_thread


@pytest.mark.usefixtures("starts_processes", "one_thread")
@pytest.mark.parametrize("variant", EXCEPTIONS)
@pytest.mark.parametrize("dtype", ALL)
def test_operations_are_the_same(dtype: str, variant: operations.Variant) -> None:
    from tpunb.backends.torchtpu.rehearsal.rehearsed_device import install

    install()
    check(dtype, variant, samples=3, each=1)
