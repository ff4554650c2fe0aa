"""The generators of random numbers of this process, as plain data."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from tpunb.training.checkpoint_device import runtime


def on_host() -> dict[str, Any]:
    """The states of torch's, Python's and, where it is loaded, numpy's global generator."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    return states


def put_on_host(states: Mapping[str, Any]) -> None:
    """Go on from what `on_host` gave."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])


def on_device() -> int | None:
    """The seed of the XLA device; None where no device is in use.

    torch_xla makes a new one at each `torch_xla.sync()`, also if nothing is pending: so it
    depends on how often loaders and checkpoints have called that.
    """
    xla = runtime()
    return None if xla is None else int(xla.core.xla_model.get_rng_state())


def put_on_device(seed: int | None) -> None:
    """Go on from what `on_device` gave."""
    xla = runtime()
    if xla is not None and seed is not None:
        xla.core.xla_model.set_rng_state(seed)
