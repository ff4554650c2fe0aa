"""Roots of Debian, in which the README's commands are typed, as root and as a user.

Making one takes root, debootstrap (Debian's package of that name), and a mirror. Ubuntu has no
mirror everywhere: a Debian with its traits stands in.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOTS = {
    "debian12": ("bookworm", True),
    "debian13": ("trixie", True),
    # Python's folder has no EXTERNALLY-MANAGED before 23.04 (Ubuntu's release notes of 23.04).
    # 24.04 has it, as Debian 12 and 13 have; both leave libpython3.x.so to a package of its own.
    "ubuntu22.04": ("bookworm", False),
}
"""Suites, and whether Python is marked as managed by the system (PEP 668)."""
_README = Path(__file__).parents[2] / "README.md"
_BEFORE = "ca-certificates,python3,python3-pip"
_NETWORK = ("PIP_", "UV_", "SSL_", "http", "HTTP", "no_proxy")


class Root:
    """A root with Debian's Python and pip, a user `ann`, and the wheel of tpunb."""

    def __init__(self, folder: Path, name: str, wheel: Path) -> None:
        suite, managed = ROOTS[name]
        self.folder = folder
        make = ["debootstrap", "--variant=minbase", f"--include={_BEFORE}", suite, str(folder)]
        subprocess.run(make, check=True, capture_output=True)
        for file in ("/etc/resolv.conf", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt"):
            if Path(file).exists():  # how this machine reaches its registries
                shutil.copy(file, f"{folder}{file}")
        if not managed:
            for mark in folder.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
                mark.unlink()
        self.wheel = f"/opt/{wheel.name}"
        shutil.copy(wheel, folder / "opt")
        self.run("root", "useradd --create-home ann")
        self.insist = " --break-system-packages" if managed else ""

    def run(self, user: str, *commands: str) -> str:
        """What commands print that are typed in a new terminal. Raises CalledProcessError."""
        env = {name: value for name, value in os.environ.items() if name.startswith(_NETWORK)}
        given = "; ".join(f"export {name}={shlex.quote(value)}" for name, value in env.items())
        typed = "set -e; " + "; ".join(filter(None, [given, "cd", *commands]))
        inside = f'mount -t proc proc "$0/proc"; exec chroot "$0" su - {user} -c "$1"'
        # The mount ends with the process.
        command = ["unshare", "--mount", "sh", "-c", inside, str(self.folder), typed]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def visit(folder: Path, name: str, wheel: Path) -> Iterator[tuple[str, str]]:
    """Type the README's commands and the doctor's; yield what was tried, and its error or ''."""
    root, text = Root(folder, name, wheel), _README.read_text(encoding="utf-8")
    [first] = re.findall(r"`sudo (apt install [^`]*python3-venv[^`]*)`", text)
    lines = [line.strip()[2:] for line in text.splitlines() if line.startswith("  $ ")]
    assert len(lines) == 2
    # The wheel in place of the registry's tpunb; torch takes 4 GB where uv finds none for the CPU.
    *_, install = lines = [re.sub(r"'tpunb\[\w+\]'", root.wheel, line) for line in lines]
    lines[-1] = install.replace("--torch-backend=cpu ", "").replace(" jupyterlab", "")
    with_pip = [f"python3 -m pip install --quiet{root.insist} {root.wheel}"]
    activate = ". ~/tpunb/bin/activate"

    def tried(what: str, user: str, *commands: str) -> Iterator[tuple[str, str]]:
        try:
            root.run(user, *commands)
            yield what, ""
        except subprocess.CalledProcessError as error:
            yield what, f"{error.stdout}{error.stderr}"

    yield from tried("apt", "root", "apt-get update", f"{first} --yes".replace("apt", "apt-get"))
    missing = "from tpunb.backends.choice import missing_libpython as m; assert not m(), m()"
    for user in ("ann", "root"):
        yield from tried(f"README, {user}", user, *lines, "tpunb --help")
        yield from tried(f"libpython, {user}", user, activate, f'python -c "{missing}"')
        yield from tried(f"system's Python, {user}", user, *with_pip, "python3 -m tpunb --help")
        for where, enter in (("venv", activate), ("system", ":")):
            doctor = root.run(user, enter, "python3 -m tpunb doctor --json || true")
            [fix] = [each["fix"] for each in json.loads(doctor)["problems"]]
            command = re.sub(r"--torch-backend=cpu .*", "six", fix.split("`")[1])
            what = f"the doctor's fix, {where}, {user}"
            yield from tried(what, user, enter, command, "cd /", 'python3 -c "import six"')
