"""torch_xla's MpDeviceLoader, which moves another loader's batches to the device ahead.

Private names, checked on torch_xla 2.8 and 2.9: `_loader`, `_parallel_loader`.
"""

from __future__ import annotations

import copy
import sys
from typing import Any


def inner(loader: Any) -> Any:
    """The loader that is in it; None of what is no MpDeviceLoader."""
    module: Any = sys.modules.get("torch_xla.distributed.parallel_loader")
    if module is None or not isinstance(loader, module.MpDeviceLoader):
        return None
    return loader._loader


def around(given: Any, other: Any) -> Any:
    """An MpDeviceLoader as the given one is, with another loader in it."""
    twin = copy.copy(given)
    twin._loader, twin._parallel_loader = other, None
    return twin
