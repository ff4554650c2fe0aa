"""torchrun's variables for a script that is started as `python script.py`."""

from __future__ import annotations


def set_variables() -> None:
    """Set what torchrun sets for one process: `init_process_group()` then makes a group of one.

    Does nothing if this process is one of several: in a run, under torchrun or another launcher,
    or if the user's own RANK, WORLD_SIZE or MASTER_ADDR may be meant for several. What is set
    stays. Exported scripts contain this function, so it imports what it uses.
    """
    import os
    import socket

    env = {name: value for name, value in os.environ.items() if value}  # as torch reads them
    one = {"RANK": "0", "WORLD_SIZE": "1"}
    one |= {f"{kind}_{name}": one[name] for kind in ("GROUP", "LOCAL", "ROLE") for name in one}
    known = {name: env[name] for name in one if name in env}
    if "WORLD_SIZE" in known:
        alone = known.items() <= one.items()
    else:  # torch says what is missing
        sizes = "NNODES OMPI_COMM_WORLD_SIZE PMI_SIZE SLURM_STEP_NUM_TASKS".split()
        alone = not known and all(env.get(name, "1") == "1" for name in sizes)
        alone &= env.get("MASTER_ADDR", "localhost") in ("127.0.0.1", "::1", "localhost")
    if not alone or "TPUNB_RUN" in env:
        return
    one |= {"ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1"}
    # Without these, Lightning would wait for processes that are never started.
    one |= {f"TORCHELASTIC_{name}": "0" for name in ("MAX_RESTARTS", "RESTART_COUNT")}
    one["TORCHELASTIC_RUN_ID"] = os.urandom(8).hex()
    if "MASTER_PORT" not in env:
        # Bound until the process ends: no other process gets this port. torch can listen on
        # it, because both set SO_REUSEADDR and this socket does not listen.
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        one["MASTER_PORT"] = str(reserved.getsockname()[1])
        reserved.detach()
    os.environ.update({name: value for name, value in one.items() if name not in env})
