"""Kernels as front ends start them, with a probe that writes what `%%tpu_train` captures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from nbformat import v4

from tests.drivers.kernel import start_kernel, stop_kernel
from tpunb.notebook.capture.history import Execution
from tpunb.notebook.capture.sources import Kernel

ROOT = Path(__file__).parents[3]
LOAD = "%load_ext capture_probe"
TRAIN = "%%tpu_train --cores 2\nloop(rate)"


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    """For a kernel that finds tpunb and the probe, and none of our own Jupyter's variables."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("JPY_")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    paths = f"{ROOT}{os.pathsep}{Path(__file__).parent}"
    env |= {"PYTHONPATH": paths, "TPUNB_PROBE": str(tmp_path / "snapshot.json")}
    env |= {"IPYTHONDIR": str(tmp_path / "ipython"), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    return env | more


def code(source: str, *tags: str, id: str | None = None) -> Any:
    cell = v4.new_code_cell(source, metadata={"tags": list(tags)})
    if id is not None:
        cell.id = id
    return cell


def write(path: Path, *cells: Any) -> Path:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = [code(cell) if isinstance(cell, str) else cell for cell in cells]
    nbformat.write(v4.new_notebook(cells=made, metadata={"kernelspec": kernel}), path)
    return path


def written(tmp_path: Path) -> dict[str, Any]:
    """What the last train cell captured."""
    found: dict[str, Any] = json.loads((tmp_path / "snapshot.json").read_text(encoding="utf-8"))
    return found


def sources(snapshot: dict[str, Any]) -> list[str]:
    return [cell["source"] for cell in snapshot["cells"]]


def kernel(
    notebook: str | None = None,
    executed: tuple[str, ...] = (),
    user_ns: dict[str, object] | None = None,
    **environ: str,
) -> Kernel:
    """A kernel as sources see it."""
    runs = tuple(Execution(source, number) for number, source in enumerate(executed, 1))
    return Kernel(notebook, environ, user_ns or {}, runs)


@contextmanager
def started(
    tmp_path: Path, module: str = "ipykernel_launcher", **env: str
) -> Iterator[BlockingKernelClient]:
    """A client of a kernel that `python -m module` starts in a folder."""
    spec = tmp_path / "kernels/made/kernel.json"
    spec.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", module, "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": argv, "display_name": "Made", "language": "python"}))
    specs = KernelSpecManager(kernel_dirs=[str(tmp_path / "kernels")])
    manager, client = start_kernel(
        lambda: KernelManager(kernel_name="made", kernel_spec_manager=specs),
        cwd=str(tmp_path),
        env=environ(tmp_path, **env),
    )
    try:
        yield client
    finally:
        stop_kernel(manager, client, now=True)


@contextmanager
def program(folder: Path, *command: str, **env: str) -> Iterator[str]:
    """A process with this command line; the pid. Programs are found in `folder`."""
    words = [str(folder / command[0]), *command[1:]] if command[0] != "-m" else list(command)
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environ(folder, PWD=str(folder), **env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.readline()  # it is that program now
            yield str(process.pid)
        finally:
            process.stdin.close()
