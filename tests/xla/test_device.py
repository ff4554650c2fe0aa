"""The environment of a rank before its train cell. The part that needs a TPU is not run."""

from __future__ import annotations

# One process imports torch_xla, and each case is a fork of it, as ranks are.
CODE = """\
import os, sys
import torch, torch_xla
from tpunb.xla import device

def case(cache, own=""):
    if os.fork():
        os.wait()
        return
    os.environ["TPUNB_XLA_CACHE"] = cache
    if own:
        import torch_xla.runtime as xr
        xr.initialize_cache(own)
    device.keep_compiled(3, 8)
    x = torch.ones(3, device="xla")
    torch_xla.sync()
    print((x + 1).cpu().tolist(), os.environ.get("XLA_PERSISTENT_CACHE_PATH"), flush=True)
    os._exit(0)

place = sys.argv[1]
case(place + "/cache")
case(place + "/unused", own=place + "/own")
case("off")
case(place + "/file")
print(torch_xla.__version__)
"""
