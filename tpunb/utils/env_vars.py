"""All environment variables of tpunb."""

from __future__ import annotations

from typing import Final

# For users: in a terminal, a container's settings or the kernel's environment.

NOTEBOOK: Final = "TPUNB_NOTEBOOK"
"""The notebook's file, if it cannot be found automatically."""
CHECKPOINTS: Final = "TPUNB_CHECKPOINTS"
"""A folder or URL for `tpunb.save` and `tpunb.load`, instead of the run folder."""
XLA_CACHE: Final = "TPUNB_XLA_CACHE"
"""The folder in which ranks on a TPU cache compiled programs, a subfolder each; 'off' for none."""
ROOT: Final = "TPUNB_ROOT"
"""A folder with the /sys, /dev and /proc/meminfo to read: those of the host of a container, or of
a simulated machine in a test."""

# Set by tpunb.

BACKEND: Final = "TPUNB_BACKEND"
"""In the processes of a run, and in a fork server: the backend, 'xla', 'torchtpu' or 'torch'."""
DEVICE: Final = "TPUNB_DEVICE"
"""In the same processes: the device of the ranks, 'TPU', 'CPU' or 'GPU'."""
RUN: Final = "TPUNB_RUN"
"""In the processes of a run: the run folder."""
SUPERVISOR: Final = "TPUNB_SUPERVISOR"
"""In a fork server: its identity, by which the kernel finds processes that a supervisor left."""
SCRIPT: Final = "TPUNB_SCRIPT"
"""In an exported script that runs by itself, and its children: the script's file."""
ATTEMPT: Final = "TPUNB_ATTEMPT"
"""In a rank: the number of the attempt, from 0 (`--retries`)."""
BOARD: Final = "TPUNB_BOARD"
"""In a rank: the descriptor of the memory file through which rehearsal ranks find each other."""
ADDRESS: Final = "TPUNB_ADDRESS"
"""In a rank of a run on several hosts: the address by which other hosts reach this one."""
RESUME: Final = "TPUNB_RESUME"
"""In a rank: where `tpunb.load` searches if the run has no checkpoint of its own (`--resume`)."""
RAN: Final = "TPUNB_RAN"
"""In the kernel of `tpunb run`: a file to which each run's folder is appended."""
_OF_TRACKERS: Final = (
    *("WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH"),
    *("MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID", "MLFLOW_ACTIVE_MODEL_ID", "_MLFLOW_ACTIVE_MODEL_ID"),
    *("_MLFLOW_TELEMETRY_SESSION_ID", "CLEARML_PROC_MASTER_ID", "TRAINS_PROC_MASTER_ID"),
)
"""Set by wandb 0.31, MLflow 3.17 and ClearML 2.1 themselves, which name their own run by them."""
PER_RUN: Final = (RUN, ATTEMPT, RESUME, RAN, *_OF_TRACKERS)
"""Variables that differ from run to run and that no cell above the train cell needs."""
CORES: Final = "TPUNB_CORES"
"""In the kernel of `tpunb run --cores`: the cores of every run, overriding its cell's options."""
