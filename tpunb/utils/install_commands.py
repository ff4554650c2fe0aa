"""The commands that errors and the doctor print: they install for the interpreter that runs."""

from __future__ import annotations

import os
import shlex
import site
import sys
import sysconfig
from importlib.machinery import PathFinder

_PYTHON = shlex.quote(sys.executable)


def _where() -> str:
    """Where packages go if this is the system's own Python, in the options of pip and uv.

    uv knows no user's folder of packages; Debian and Ubuntu want one to insist (PEP 668).
    """
    if sys.prefix != sys.base_prefix:  # a virtual environment
        return ""
    if site.ENABLE_USER_SITE and not os.access(sysconfig.get_path("purelib"), os.W_OK):
        return f" --target {shlex.quote(site.getusersitepackages())}"
    managed = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    return " --break-system-packages" if os.path.exists(managed) else ""


# Not importlib.util.find_spec: it asks the hook of setuptools, which takes that for a start of pip
# and then gives this process the standard library's distutils. TorchInductor needs setuptools'.
_HAS_PIP = PathFinder.find_spec("pip") is not None
_WITH_UV = f"pip install --python {_PYTHON}{_where()}"
PIP_INSTALL = f"{_PYTHON} -m pip install{_where()}" if _HAS_PIP else f"uv {_WITH_UV}"
"""Installs packages. An interpreter without pip was made by uv."""
UV_INSTALL = f"{PIP_INSTALL} uv && {_PYTHON} -m uv {_WITH_UV}" if _HAS_PIP else PIP_INSTALL
UV_INSTALL = f"{UV_INSTALL} --torch-backend=cpu"
"""Installs torch, or packages that need it. uv selects torch's CPU wheels, which Colab's and
Kaggle's TPU images have; pip selects those with CUDA, which are ten times as large."""
INSTALL_XLA = f"{UV_INSTALL} 'tpunb[xla]'"
"""Installs torch and torch_xla."""
INSTALL_TORCH = f"{UV_INSTALL} 'torch>=2.11,<2.16'"
"""Installs torch alone, for all that needs neither torch_xla nor a TPU."""
INSTALL_TORCHTPU = f"{UV_INSTALL} 'tpunb[torchtpu]'"
"""Installs torch and torch_tpu."""
