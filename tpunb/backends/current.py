"""The backend of this process. Standard library only, until a backend is loaded."""

from __future__ import annotations

import functools
import importlib
import os
from typing import cast

from tpunb.backends.base import Backend
from tpunb.runs.spec import BackendName, Device
from tpunb.utils import env_vars

MODULES: dict[BackendName, str] = {
    "xla": "tpunb.backends.xla.xla_backend",
    "torchtpu": "tpunb.backends.torchtpu.torchtpu_backend",
    "torch": "tpunb.backends.torch.torch_backend",
}
"""The module of each backend; its `backend` is the `Backend`."""


def name() -> BackendName:
    """The name of this process's backend: TPUNB_BACKEND, which runs set; 'xla' without it."""
    return cast(BackendName, os.environ.get(env_vars.BACKEND, "xla"))


def device() -> Device:
    """The device of this process's ranks: TPUNB_DEVICE, which runs set; 'CPU' without it."""
    return cast(Device, os.environ.get(env_vars.DEVICE, "CPU"))


@functools.cache
def backend() -> Backend:
    """This process's backend, and that of its forks. Imports torch, and torch_xla for 'xla'."""
    found: Backend = importlib.import_module(MODULES[name()]).backend
    return found
