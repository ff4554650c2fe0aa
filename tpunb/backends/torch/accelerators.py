"""accelerate and Lightning in the ranks of a run that they do not recognise as such.

On processors, accelerate 1.15 uses the other processes only if ACCELERATE_USE_CPU is set, as
`accelerate launch --cpu` does, and Lightning 2.6 only with their number. Neither knows
TorchTPU. Without a word, each process then trains by itself with all of the data. transformers'
Trainer makes an Accelerator, too.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from tpunb.backends.base import RankSetup
from tpunb.backends.xla.private_names import CONNECTORS, FABRIC, TRAINER
from tpunb.runs.spec import BackendName
from tpunb.utils.errors import SetupError
from tpunb.utils.patching import Replacements

USE_CPU = "ACCELERATE_USE_CPU"
_ONLY_CPU = "Leave accelerator out to train on processors"
_made: list[str] = []
"""What Lightning has made in this process that counts processes."""


def note_made() -> None:
    """Before the prelude: note what counts the processes there, where this one is alone."""

    def watch(module: ModuleType) -> None:
        def note(devices: Any, num_nodes: Any) -> tuple[Any, Any]:
            _made.append("Fabric" if module.__name__.startswith(FABRIC) else "Trainer")
            return devices, num_nodes

        _wrap_connector(module, note)

    Replacements(dict.fromkeys(CONNECTORS, watch)).begin()


def fork_problem() -> str | None:
    """What the prelude has made that would train alone in each rank."""
    accelerate: Any = sys.modules.get("accelerate.state")
    # The state of Accelerator and of TrainingArguments (accelerate 1.15).
    if accelerate is not None and accelerate.PartialState._shared_state:
        return "makes an Accelerator or TrainingArguments, which count the ranks"
    return f"makes a {_made[-1]}, which counts the ranks" if _made else None


def watch_accelerators(backend: BackendName, setup: RankSetup) -> None:
    """For the rest of this rank: have Accelerators, Trainers and Fabrics use all ranks, or refuse.

    What is refused is training: each rank may evaluate by itself.
    """
    replace = _of_lightning(backend, setup)
    if setup.world_size > 1:
        if backend == "torch" and setup.device == "CPU":
            os.environ.setdefault(USE_CPU, "true")
        replace["accelerate.accelerator"] = functools.partial(_accelerate, backend, setup)
    Replacements(replace).begin()


def _accelerate(backend: BackendName, setup: RankSetup, module: ModuleType) -> None:
    original = module.Accelerator.__init__

    @functools.wraps(original)
    def init(self: Any, *args: object, **options: object) -> None:
        original(self, *args, **options)
        if self.num_processes == 1:
            why = ". Use --cores 1, or train with DistributedDataParallel"
            if self.distributed_type == "XLA":
                why = f": it uses torch_xla, and the run has {backend}. Set USE_TORCH_XLA=0"
            elif backend == "torchtpu":
                why = f", because accelerate does not know TorchTPU{why} or fully_shard"
            raise SetupError(_alone("Accelerator", setup) + why)

    module.Accelerator.__init__ = init


def _of_lightning(
    backend: BackendName, setup: RankSetup
) -> dict[str, Callable[[ModuleType], None]]:
    """Make a Trainer and a Fabric one of the run's processes, which the user has not to count."""
    ranks, local = setup.world_size, setup.local_world_size

    def connect(module: ModuleType) -> None:
        def count(devices: Any, num_nodes: Any) -> tuple[Any, Any]:
            nodes = ranks // local if num_nodes == 1 else num_nodes
            return local if devices == "auto" else devices, nodes

        connector = _wrap_connector(module, count)
        if setup.device != "GPU":
            connector._choose_gpu_accelerator_backend = staticmethod(no_gpu)

    def no_gpu() -> NoReturn:
        raise SetupError(f'accelerator="gpu", but this run has no GPU. {_ONLY_CPU}')

    def no_xla(self: object, *args: object, **options: object) -> NoReturn:
        raise SetupError(
            f"Lightning's accelerator=\"tpu\" is torch_xla's, and the run has {backend}. "
            f"{_ONLY_CPU}, or train with DistributedDataParallel or fully_shard"
        )

    def without_xla(module: ModuleType) -> None:
        module.XLAAccelerator.__init__ = no_xla
        module.XLAAccelerator.is_available = staticmethod(lambda: False)

    def validate(environment: object, num_devices: int, num_nodes: int) -> None:
        if num_devices * num_nodes != ranks:
            raise SetupError(
                f"devices={num_devices} and num_nodes={num_nodes} of Lightning, but the run has "
                f"{ranks} rank{'s' if ranks > 1 else ''}: leave both out, or run the cell with "
                f"--cores {num_devices}"
            )

    def check_count(module: ModuleType) -> None:
        module.TorchElasticEnvironment.validate_settings = validate

    def watch_single(module: ModuleType) -> None:
        fabric = module.__name__.startswith(FABRIC)

        def refuse(self: object, *args: object) -> NoReturn:
            raise SetupError(
                f"{_alone('Fabric' if fabric else 'Trainer', setup)}: it has one device. Leave "
                "devices=1 out, or use --cores 1"
            )

        name = "setup_optimizer" if fabric else "setup_optimizers"
        setattr(module.SingleDeviceStrategy, name, refuse)

    found: dict[str, Callable[[ModuleType], None]] = dict.fromkeys(CONNECTORS, connect)
    for package in FABRIC:
        found[f"{package}.accelerators.xla"] = without_xla
        found[f"{package}.plugins.environments.torchelastic"] = check_count
    if ranks > 1:
        found |= {f"{each}.strategies.single_device": watch_single for each in (*TRAINER, *FABRIC)}
    return found


def _wrap_connector(module: ModuleType, change: Callable[..., tuple[Any, Any]]) -> Any:
    """Change devices and num_nodes of Trainers or Fabrics; return the class that gets them."""
    connector = getattr(module, CONNECTORS[module.__name__])
    original = connector._check_device_config_and_set_final_flags

    def check(self: object, devices: Any, num_nodes: Any) -> None:
        devices, num_nodes = change(devices, num_nodes)
        original(self, devices=devices, num_nodes=num_nodes)

    connector._check_device_config_and_set_final_flags = check
    return connector


def _alone(what: str, setup: RankSetup) -> str:
    ranks = setup.world_size
    return (
        f"this {what} does not know the other {ranks - 1} rank{'s' if ranks > 2 else ''} of "
        f"the run: each of the {ranks} ranks would train by itself, with all of the data"
    )
