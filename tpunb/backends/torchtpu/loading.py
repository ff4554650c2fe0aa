"""Keeps torch_tpu out of a process with a rehearsed TPU, where its kernels would abort.

Standard library only.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""torch's variable: by default, and with '1', `import torch` loads the packages that add a device.

torch_tpu 0.2.0 sets it to '1' when torch has loaded it, so a '1' may not be the user's choice.
"""


def is_loaded() -> bool:
    """Return whether this process has torch_tpu itself, not its stand-in."""
    spec = getattr(sys.modules.get("torch_tpu"), "__spec__", None)
    return spec is not None and spec.loader is not None


def put_stand_in() -> None:
    """Have `import torch_tpu` find an empty module."""
    made = ModuleType("torch_tpu", "stands in for torch_tpu in a rehearsal")
    made.__spec__ = ModuleSpec("torch_tpu", None)
    sys.modules.setdefault("torch_tpu", made)


def remove_stand_in() -> None:
    """Have `import torch_tpu` find torch_tpu again."""
    if not is_loaded():
        sys.modules.pop("torch_tpu", None)
