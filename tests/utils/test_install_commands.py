"""The commands that errors print are made in the user's process, which they must not change."""

import subprocess
import sys

import pytest


@pytest.mark.usefixtures("starts_processes")
def test_setuptools_can_be_imported_afterwards() -> None:
    imports = "import tpunb.utils.install_commands, setuptools, distutils"
    subprocess.run([sys.executable, "-W", "error", "-c", imports], check=True)
