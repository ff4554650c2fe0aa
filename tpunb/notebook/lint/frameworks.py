"""Libraries with a training loop of their own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Framework:
    """A library whose `Trainer`, or class with such a name, has the training loop."""

    name: str
    packages: tuple[str, ...]
    start: str
    """The method of a trainer that starts the loop."""
    steps: tuple[str, ...]
    """Methods that the loop calls in each step."""


FRAMEWORKS = (
    Framework("transformers", ("transformers", "trl"), "train", ("compute_loss", "training_step")),
    Framework("Lightning", ("lightning", "pytorch_lightning"), "fit", ("training_step",)),
)
PACKAGES = {
    *("accelerate", "pytorch_lightning", "lightning", "fastai", "fastai2", "catalyst", "poutyne"),
    *("fastai_xla_extensions", "ignite", "composer", "trl", "lightning_fabric"),
}
"""Packages that reduce gradients, mark steps and shard data themselves."""
