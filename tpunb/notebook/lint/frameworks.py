"""Libraries with a training loop of their own: what makes it, and what starts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Framework:
    """A library with a training loop of its own."""

    name: str
    packages: tuple[str, ...]
    makes: Callable[[str], bool]
    """Whether something with this last name makes what trains."""
    usual: tuple[str, ...]
    """Last parts of the names that it has, where nothing shows what made it."""
    methods: tuple[str, ...]
    """What starts the loop."""
    steps: tuple[str, ...] = ()
    """Methods that the loop calls in each step."""
    reduces: bool = True
    """Whether its ranks train one model on XLA devices, without more code."""


FRAMEWORKS = (
    Framework(
        "transformers",
        ("transformers", "trl"),
        lambda name: name.endswith("Trainer"),
        ("trainer",),
        ("train",),
        ("compute_loss", "training_step"),
    ),
    Framework(
        "Lightning",
        ("lightning", "pytorch_lightning"),
        lambda name: name == "Trainer",
        ("trainer",),
        ("fit",),
        ("training_step",),
    ),
    Framework(
        "ignite",
        ("ignite",),
        lambda name: name in ("Engine", "create_supervised_trainer"),
        ("trainer",),
        ("run",),
        reduces=False,
    ),
    Framework(
        "fastai",
        ("fastai", "fastai2"),
        lambda name: name.lower().endswith("learner"),
        ("learn", "learner"),
        ("fit", "fit_one_cycle", "fit_flat_cos", "fit_sgdr", "fine_tune"),
        reduces=False,
    ),
)
ACCELERATE = Framework(
    "Accelerate",
    ("accelerate",),
    lambda name: name == "Accelerator",
    ("accelerator",),
    ("backward",),
)
"""Its loops are written out, but for the backward pass."""
PACKAGES = {
    *("accelerate", "pytorch_lightning", "lightning", "fastai", "fastai2", "catalyst", "poutyne"),
    *("fastai_xla_extensions", "ignite", "composer", "trl", "lightning_fabric"),
}
"""Packages that reduce gradients, mark steps and shard data themselves."""
