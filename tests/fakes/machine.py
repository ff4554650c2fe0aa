"""The files of a machine that is made up, and the processes that have its TPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tpunb.machine.tpu import GOOGLE
from tpunb.machine.tpu_users import LOCK
from tpunb.utils.env_vars import ROOT

_IDS = {
    "v2": "0x0027",
    "v3": "0x0027",
    "v4": "0x005e",
    "v5p": "0x0062",
    "v5e": "0x0063",
    "v6e": "0x006f",
    "v7x": "0x0076",
}
_OLD = ("v2", "v3", "v4")
"""Those with /dev/accelN; the others have /dev/vfio/N."""
_HOLD = """\
import fcntl, os, signal, sys
files = [open(path, "r+") for path in sys.argv[2:] if path]
if sys.argv[1]:
    locked = open(sys.argv[1], "r+")
    fcntl.lockf(locked, fcntl.LOCK_EX)
print("holds", flush=True)
sys.stdin.read()
"""


class FakeMachine:
    """A folder with /sys, /dev, /proc/meminfo and /tmp as a machine has them."""

    def __init__(self, root: Path, env: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.env = {"HOME": str(root / "root"), ROOT: str(root)} | dict(env or {})
        self._holders: list[subprocess.Popen[str]] = []
        for folder in ("root", "tmp", "dev", "proc/1", "sys/bus/pci/devices"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        self.memory(64)
        self.device("0x8086", "0x7190")  # not every device on the bus is a TPU

    def __enter__(self) -> FakeMachine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._holders:
            self.release_lifelines(process)

    def device(self, vendor: str, number: str) -> FakeMachine:
        """One more device on the PCI bus."""
        bus = self.root / "sys/bus/pci/devices"
        path = bus / f"0000:00:{len(list(bus.iterdir())):02x}.0"
        path.mkdir()
        (path / "vendor").write_text(f"{vendor}\n")
        (path / "device").write_text(f"{number}\n")
        return self

    def chips(self, generation: str, count: int, *, files: bool = True) -> FakeMachine:
        """TPU chips, and the device files that belong to them."""
        for number in range(count):
            self.device(GOOGLE, _IDS[generation])
            if files:
                name = f"accel{number}" if generation in _OLD else f"vfio/{number}"
                self.file(f"dev/{name}")
            if generation not in _OLD:
                chip = max((self.root / "sys/bus/pci/devices").iterdir())
                (chip / "iommu_group").symlink_to(f"../../../kernel/iommu_groups/{number}")
        if files and generation not in _OLD:
            self.file("dev/vfio/vfio")
        return self

    def file(self, name: str, text: str = "") -> FakeMachine:
        """A file, and the folders above it."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return self

    def folder(self, name: str) -> FakeMachine:
        (self.root / name).mkdir(parents=True, exist_ok=True)
        return self

    def memory(self, gib: float) -> FakeMachine:
        """So much is free."""
        return self.file("proc/meminfo", f"MemAvailable: {int(gib * 2**20)} kB\n")

    def googles(self) -> FakeMachine:
        """A virtual machine of Google's, by its own word."""
        return self.file("sys/class/dmi/id/product_name", "Google Compute Engine\n")

    def lock_file(self) -> Path:
        """The file that libtpu leaves behind."""
        self.file(LOCK)
        return self.root / LOCK

    def packages(
        self, versions: Mapping[str, str], needs: Mapping[str, Iterable[str]] | None = None
    ) -> str:
        """A site-packages with the metadata of packages, and nothing to import. Its path."""
        site = self.root / "site-packages"
        for name, version in versions.items():
            lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
            lines += [f"Requires-Dist: {need}" for need in (needs or {}).get(name, ())]
            folder = f"site-packages/{name.replace('-', '_')}-{version}.dist-info"
            self.file(f"{folder}/METADATA", "\n".join([*lines, "", ""]))
        site.mkdir(exist_ok=True)
        return str(site)

    def hold(
        self,
        *devices: str,
        kernel: str = "",
        run: Path | None = None,
        lock: bool = False,
        user: int | None = None,
    ) -> subprocess.Popen[str]:
        """A process that has devices ('accel0', 'vfio/3') open, and ends with this machine.

        `kernel`: the notebook of which it is the kernel. `run`: the folder of the run of which it
        is a rank. `lock`: it has locked libtpu's file. `user`: its uid.
        """
        files = [str(self.root / "dev" / name) for name in devices]
        env: dict[str, Any] = dict(os.environ)
        command = [sys.executable, "-c", _HOLD]
        if kernel:
            env["JPY_SESSION_NAME"] = kernel
        if run is not None:
            rank = run / "attempts/0/0"
            rank.mkdir(parents=True, exist_ok=True)
            (rank / "stdout.log").touch()
            files.append(str(rank / "stdout.log"))
        command += [str(self.lock_file()) if lock else "", *files]
        command += ["", "-m", "ipykernel_launcher"] if kernel else []
        if kernel:  # the words that are no files are in the command line only
            command[2] = _HOLD.replace("if path]", "if path.startswith('/')]")
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, user=user
        )
        assert process.stdout is not None
        if process.stdout.readline() != "holds\n":
            raise RuntimeError(f"{json.dumps(command)} could not open its files")
        self._holders.append(process)
        return process

    def release_lifelines(self, process: subprocess.Popen[str]) -> None:
        """End a process that `hold` has started."""
        process.communicate()  # closes its standard input
        if process in self._holders:
            self._holders.remove(process)
