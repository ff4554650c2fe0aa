"""Every environment variable of tpunb."""

from __future__ import annotations

from typing import Final

# For users: in a terminal, a container's settings or the kernel's environment.

NOTEBOOK: Final = "TPUNB_NOTEBOOK"
"""The notebook's file, if it is not found by itself."""
CHECKPOINTS: Final = "TPUNB_CHECKPOINTS"
"""A folder or URL for `tpunb.save` and `tpunb.load`, instead of the run folder."""
XLA_CACHE: Final = "TPUNB_XLA_CACHE"
"""Where ranks on a TPU keep compiled programs, a folder each; 'off': nowhere."""
ROOT: Final = "TPUNB_ROOT"
"""A folder with the /sys, /dev and /proc/meminfo to look at: those of a host below a container,
or of a machine made up for a test."""

# Set by tpunb.

RUN: Final = "TPUNB_RUN"
"""In the processes of a run: its folder."""
SUPERVISOR: Final = "TPUNB_SUPERVISOR"
"""In a fork server: which one it is, for the kernel to find what its supervisor has left."""
ATTEMPT: Final = "TPUNB_ATTEMPT"
"""In a rank: how often the ranks were started before, from 0 (`--retries`)."""
BOARD: Final = "TPUNB_BOARD"
"""In a rank: the descriptor of the file in memory through which rehearsal ranks find each other."""
ADDRESS: Final = "TPUNB_ADDRESS"
"""In a rank of a run on several hosts: the address by which other hosts reach this one."""
RESUME: Final = "TPUNB_RESUME"
"""In a rank: where `tpunb.load` looks if the run has no checkpoint of its own (`--resume`)."""
RAN: Final = "TPUNB_RAN"
"""In the kernel of `tpunb run`: a file to which each run's folder is appended."""
PER_RUN: Final = (RUN, ATTEMPT, RESUME, RAN)
"""They differ from run to run, and no cell above the train cell needs them."""
CORES: Final = "TPUNB_CORES"
"""In the kernel of `tpunb run --cores`: cores of every run, whatever its cell says."""
ON: Final = "TPUNB_ON"
"""In the kernel of a trial: the place of every run (`tpunb sweep --on`)."""
TRIALS: Final = "TPUNB_TRIALS"
"""In the kernel of a trial: how many runs like its own there may be, which may cost too much
together; 0: that was asked before the sweep began."""
RUNS: Final = "TPUNB_RUNS"
"""In the kernel of a trial: where run folders go."""
LENT: Final = "TPUNB_LENT"
"""In the kernel of a trial: the folder of the supervisor that serves one trial after the other."""
SWEEP: Final = "TPUNB_SWEEP"
"""In all processes of a sweep's trials: which sweep it is, and which of those beside each other."""
