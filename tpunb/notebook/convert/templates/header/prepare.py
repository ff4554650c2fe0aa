"""Preparation of an exported script before it trains, with tpunb if installed, or without it.

Never imported: `export.py` copies the functions that a script uses into its header.
"""

import importlib as _tpunb_importlib
import os as _tpunb_os
import sys as _tpunb_sys
import types as _tpunb_types
from collections.abc import Callable as _TpunbCallable


def _tpunb_prepare(without_tpunb: _TpunbCallable[[], None], **options: object) -> None:
    """With tpunb, rehearse on machines without a TPU; launchers call their function in place.

    Without tpunb there is no rehearsal, and only the functions of tpunb that this script uses.
    """
    import importlib.util

    if importlib.util.find_spec("tpunb"):
        _tpunb_importlib.import_module("tpunb.worker.standalone").prepare(**options)
        return
    without_tpunb()


def _tpunb_launch_here() -> None:
    """Without tpunb, let torch_xla's launchers call their function in this process.

    Under torchrun each process is one core of the TPU; torch_xla sets this up when it creates a
    process group (https://docs.pytorch.org/xla, "Distributed Data Parallel").
    """
    torch_xla = _tpunb_importlib.import_module("torch_xla")
    xmp = _tpunb_importlib.import_module("torch_xla.distributed.xla_multiprocessing")
    rank = int(_tpunb_os.environ.get("RANK", "0"))
    if int(_tpunb_os.environ.get("WORLD_SIZE", "1")) > 1:
        if _tpunb_importlib.import_module("torch_xla.runtime").device_type() == "TPU":
            dist = _tpunb_importlib.import_module("torch.distributed")
            _tpunb_importlib.import_module("torch_xla.distributed.xla_backend")
            dist.init_process_group("xla", init_method="xla://")
            dist.destroy_process_group()
        elif rank == 0:
            print(
                "No TPU was found, and a rehearsal needs tpunb (pip install tpunb): each of "
                f"{_tpunb_os.environ['WORLD_SIZE']} processes trains by itself.",
                file=_tpunb_sys.stderr,
                flush=True,
            )

    def spawn(function, args=(), nprocs=None, join=True, daemon=False, start_method="spawn"):  # type: ignore[no-untyped-def]
        function(rank, *args)

    def launch(function, args=(), start_method="spawn", debug_single_process=False):  # type: ignore[no-untyped-def]
        function(rank, *args)

    xmp.spawn = spawn  # type: ignore[attr-defined]
    torch_xla.launch = launch  # type: ignore[attr-defined]


def _tpunb_stand_in(**functions: object) -> None:
    """Make the functions importable as tpunb."""

    def missing(name: str) -> object:
        raise AttributeError(
            f"tpunb.{name} needs tpunb, which is not installed here: pip install tpunb. "
            f"Without it this script has {', '.join(sorted(functions))}"
        )

    module = _tpunb_types.ModuleType("tpunb")
    module.__dict__.update(functions, __getattr__=missing)
    _tpunb_sys.modules["tpunb"] = module
