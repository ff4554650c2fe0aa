"""Libraries with a training loop of their own, and the names that construct and start it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Framework:
    """A library with a training loop of its own."""

    name: str
    packages: tuple[str, ...]
    makes: Callable[[str], bool]
    """Whether a class or function with this last name part constructs a trainer."""
    usual: str
    """The usual name of a trainer, for one whose construction is not visible."""
    start: str
    """The method of a trainer that starts the loop."""
    steps: tuple[str, ...] = ()
    """Methods that the loop calls in each step."""


FRAMEWORKS = (
    Framework(
        "transformers",
        ("transformers", "trl"),
        lambda name: name.endswith("Trainer"),
        "trainer",
        "train",
        ("compute_loss", "training_step"),
    ),
    Framework(
        "Lightning",
        ("lightning", "pytorch_lightning"),
        lambda name: name == "Trainer",
        "trainer",
        "fit",
        ("training_step",),
    ),
)
ACCELERATE = Framework(
    "Accelerate",
    ("accelerate",),
    lambda name: name == "Accelerator",
    "accelerator",
    "backward",
)
"""Users write its loops themselves; only the backward pass is the library's."""

PACKAGES = {
    *("accelerate", "pytorch_lightning", "lightning", "fastai", "fastai2", "catalyst", "poutyne"),
    *("fastai_xla_extensions", "ignite", "composer", "trl", "lightning_fabric"),
}
"""Packages that reduce gradients, mark steps and shard data themselves."""
