"""tpunb: train PyTorch models on TPUs from a notebook."""

from __future__ import annotations

__version__ = "0.1.0"
