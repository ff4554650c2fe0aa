"""torchrun's variables for a script that is started as `python script.py`."""

from __future__ import annotations

import os


def set_variables() -> None:
    """Set what torchrun sets for one process, unless a launcher has started this one."""
    launched = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR TPUNB_RUN".split()
    sizes = "NNODES OMPI_COMM_WORLD_SIZE PMI_SIZE SLURM_STEP_NUM_TASKS".split()
    if any(map(os.environ.get, launched)) or any(os.environ.get(n, "1") != "1" for n in sizes):
        return
    kinds = ("", "LOCAL_", "GROUP_", "ROLE_")
    made = {f"{kind}RANK": "0" for kind in kinds} | {f"{kind}WORLD_SIZE": "1" for kind in kinds}
    made |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ROLE_NAME": "default"}
    made |= {f"TORCHELASTIC_{name}": "0" for name in ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS")}
    os.environ.update({name: made[name] for name in made if not os.environ.get(name)})
