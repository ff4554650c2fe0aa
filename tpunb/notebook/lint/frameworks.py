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
    usual: tuple[str, ...]
    """Usual names of trainer objects, for a trainer whose construction is not visible."""
    methods: tuple[str, ...]
    """Methods of a trainer that start the loop."""
    steps: tuple[str, ...] = ()
    """Methods that the loop calls in each step."""
    reduces: bool = True
    """True if its ranks train one common model on XLA devices without further code."""


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
"""Users write its loops themselves; only the backward pass is the library's."""


def is_training_arguments(name: str) -> bool:
    """Whether a class with this name has the arguments of transformers' Trainer."""
    return name.endswith("TrainingArguments") or name in _OF_TRL


_OF_TRL = {f"{name}Config" for name in ("SFT", "DPO", "GRPO", "KTO", "ORPO", "Reward", "RLOO")}
PACKAGES = {
    *("accelerate", "pytorch_lightning", "lightning", "fastai", "fastai2", "catalyst", "poutyne"),
    *("fastai_xla_extensions", "ignite", "composer", "trl", "lightning_fabric"),
}
"""Packages that reduce gradients, mark steps and shard data themselves."""
