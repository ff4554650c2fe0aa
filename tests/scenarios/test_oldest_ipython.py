"""tpunb with the IPython of Colab, which is older than any that this environment would take."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tpunb.utils.files import PACKAGE_ROOT

USED = """
import importlib, pkgutil
import IPython, tpunb
from IPython.core.interactiveshell import InteractiveShell

for module in pkgutil.walk_packages(tpunb.__path__, "tpunb."):
    if module.name.startswith(("tpunb.kernel", "tpunb.display", "tpunb.notebook.c", "tpunb.data")):
        importlib.import_module(module.name)
shell = InteractiveShell.instance()
for cell in ("%load_ext tpunb", "%tpu_setup --backend torch --no-warm", "%tpu_runs",
             "%%tpu_train --cores 1 --dry-run\\nprint(1)"):
    assert shell.run_cell(cell, store_history=True).success, cell
print("works with IPython", IPython.__version__)
"""


@pytest.mark.usefixtures("starts_processes")
def test_extension_works_with_the_oldest_ipython(tmp_path: Path) -> None:
    wanted = (Path(PACKAGE_ROOT) / "pyproject.toml").read_text(encoding="utf-8")
    oldest = re.findall(r'"((?:ipython|ipykernel|ipywidgets)>=[\d.]+)"', wanted)
    assert len(oldest) == 3
    uv, site = str(Path(sys.executable).with_name("uv")), tmp_path / "site"
    into = ["--quiet", "--python", sys.executable, "--target", str(site)]
    subprocess.run(
        [uv, "pip", "install", *into, *(each.replace(">=", "==") for each in oldest)], check=True
    )
    done = subprocess.run(
        [sys.executable, "-c", USED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site), "IPYTHONDIR": str(tmp_path / "ipython")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "works with IPython 7." in done.stdout
