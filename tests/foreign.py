"""What a run of one backend does not have, so that no advice in it may name it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tpunb.runs.spec import BackendName

_XLA = (
    r"\b(?:xm|xr|xs|xmp|pl|xf)\.\w|torch_xla|\bXLA|PJRT|openxla|MpDeviceLoader|\.sync\(\)"
    r"|['`]xla['`]|pytorch/xla"
)
_TORCHTPU = r"torch_tpu|TorchTPU|torch\.tpu|tpu_dist|['`]tpu['`]"
_TPU = r"\bTPUs?\b|libtpu|\bTPU_"
_CUDA = r"(?i:cuda|nccl|nvidia|\bGPUs?\b)"
_FOREIGN: dict[BackendName, tuple[str, ...]] = {
    "xla": (_TORCHTPU, _CUDA),
    "torchtpu": (_XLA, _CUDA),
    "torch": (_XLA, _TORCHTPU, _TPU),
}


def foreign(text: str, backend: BackendName, said: Sequence[str] = ("",)) -> list[str]:
    """Return the words of `text` about what a backend lacks, except about what each of `said`, the
    code or error of the user that it answers, names itself.
    """
    kinds = [k for k in _FOREIGN[backend] if not all(re.search(k, each) for each in said)]
    return [match[0] for kind in kinds for match in re.finditer(kind, text)]
