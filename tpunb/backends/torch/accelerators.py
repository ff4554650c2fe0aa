"""accelerate in the ranks of a run that it does not recognise as such.

On processors, accelerate 1.15 uses the other processes only if ACCELERATE_USE_CPU is set, as
`accelerate launch --cpu` does, and it does not know TorchTPU. Without a word, each process then
trains by itself with all of the data. transformers' Trainer makes an Accelerator, too.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType

from tpunb.backends.base import RankSetup
from tpunb.runs.spec import BackendName
from tpunb.utils.errors import SetupError
from tpunb.utils.patching import Replacements

USE_CPU = "ACCELERATE_USE_CPU"


def watch_accelerators(backend: BackendName, setup: RankSetup) -> None:
    """For the rest of this rank: have Accelerators use all ranks, or refuse them."""
    if setup.world_size == 1:
        return
    if backend == "torch" and setup.device == "CPU":
        os.environ.setdefault(USE_CPU, "true")

    def refuse(module: ModuleType) -> None:
        original = module.Accelerator.__init__

        @functools.wraps(original)
        def init(self: object, *args: object, **options: object) -> None:
            original(self, *args, **options)
            if self.num_processes == 1:  # type: ignore[attr-defined]
                raise SetupError(_alone(backend, setup.world_size))

        module.Accelerator.__init__ = init

    Replacements({"accelerate.accelerator": refuse}).begin()


def _alone(backend: BackendName, ranks: int) -> str:
    alone = (
        f"this Accelerator does not know the other {ranks - 1} rank{'s' if ranks > 2 else ''} of "
        f"the run: each of the {ranks} ranks would train by itself, with all of the data"
    )
    if backend == "torchtpu":
        return (
            f"{alone}, because accelerate does not know TorchTPU. Use --cores 1, or train with "
            "DistributedDataParallel or fully_shard"
        )
    return f"{alone}. Make the first Accelerator in the train cell, not in a cell above"
