"""`environment = "make"`: installs this interpreter's packages on every host with uv."""

from __future__ import annotations

import base64
import hashlib
import inspect
import io
import json
import shlex
import tarfile
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from tpunb.places import remote
from tpunb.places.check import HostsReport, quote
from tpunb.places.errors import HostsError
from tpunb.places.place import Cancelled
from tpunb.places.transport import Transport, ask_hosts
from tpunb.utils.files import PACKAGE_ROOT
from tpunb.utils.version import __version__

LONGEST = 3600.0
"""Time-out of the installation in seconds."""
_LEFT_OUT = ("tpunb", "pip", "setuptools", "uv")
_NVIDIA = ("nvidia-", "triton")
"""Prefixes of torch's packages for CUDA, which a TPU host does not need."""
WHEEL = f"tpunb-{__version__}-py3-none-any.whl"

MAKE = """
set -eu
cd {folder}
uv=$(command -v uv || echo "$HOME/.local/bin/uv")
test -x "$uv" || {{ echo 'uv is not installed: python3 -m pip install --user uv' >&2; exit 1; }}
rm -f env/made
"$uv" venv --quiet --allow-existing --python {python} env
"$uv" pip install --quiet --python env/bin/python --no-deps --torch-backend=cpu -r make/lock.txt
"$uv" pip install --quiet --python env/bin/python --no-deps --reinstall make/{wheel}
echo {digest} >env/made
"""


def write_lock(*, tpu: bool) -> str:
    """Lines `name==version` for this interpreter's packages; `tpu`: including libtpu.

    Packages in editable mode are left out: a registry need not have their version.
    """
    lines = set()
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if not name or name in _LEFT_OUT or name.startswith(_NVIDIA) or _is_editable(distribution):
            continue
        lines.add(f"{name}=={distribution.version.partition('+')[0]}")
    if tpu and not any(line.startswith("libtpu==") for line in lines):
        lines.update(_libtpu())
    return "\n".join(sorted(lines)) + "\n"


def editable_packages() -> list[str]:
    """Names of the packages, apart from tpunb, that are installed in editable mode."""
    found = (each.metadata["Name"] for each in metadata.distributions() if _is_editable(each))
    return sorted({name for name in found if name.lower() not in _LEFT_OUT})


def _is_editable(distribution: metadata.Distribution) -> bool:
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        return bool(origin.get("dir_info", {}).get("editable"))
    except (AttributeError, ValueError):  # not as PEP 610 describes it
        return False


def _libtpu() -> list[str]:
    """The requirement of the installed torch_xla for libtpu."""
    try:
        needed = metadata.requires("torch_xla") or []
    except metadata.PackageNotFoundError:
        return []
    return [line.partition(";")[0].strip() for line in needed if line.startswith("libtpu")]


def build_wheel() -> bytes:
    """This installation of tpunb as a wheel, also if it is a clone."""
    distribution = metadata.distribution("tpunb")
    info = f"tpunb-{__version__}.dist-info"
    entries = {
        path.relative_to(PACKAGE_ROOT).as_posix(): path.read_bytes()
        for path in sorted(Path(PACKAGE_ROOT, "tpunb").rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    text = distribution.read_text("METADATA") or ""
    entries[f"{info}/METADATA"] = text.encode()
    entries[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: tpunb\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    entries[f"{info}/entry_points.txt"] = (
        distribution.read_text("entry_points.txt") or ""
    ).encode()
    record = "".join(f"{name},{_hash(data)},{len(data)}\n" for name, data in entries.items())
    entries[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in entries.items():
            # With a fixed time, the same files make the same wheel.
            wheel.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
    return made.getvalue()


def _hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}"


def make_environment(
    transport: Transport,
    report: HostsReport,
    say: Callable[[str], None],
    cancelled: Callable[[], bool],
) -> None:
    """Install this interpreter's packages on every host that does not have them yet.

    Raises HostsError for hosts where the installation fails, and Cancelled.
    """
    settings = report.place.host_settings
    tpu = any(host.machine.chips for _, host in report.answered) or any(
        host.chips_seen for _, host in report.answered
    )
    lock, wheel = write_lock(tpu=tpu).encode(), build_wheel()
    digest = hashlib.sha256(lock + wheel).hexdigest()[:16]
    hosts = range(len(transport.hosts))
    folder = f"{settings.folder.rstrip('/')}"
    asked = f"cat {quote(folder + '/env/made')} 2>/dev/null || true"
    answers = ask_hosts(transport, dict.fromkeys(hosts, (asked, b"")), cancelled=cancelled)
    # The last word: a login shell may have printed something before.
    made_there = {host: answer.output.split()[-1:] for host, answer in answers.items()}
    old = [host for host, found in made_there.items() if found != [digest.encode()]]
    if cancelled():
        raise Cancelled
    if not old:
        return
    names = ", ".join(report.names[host] for host in old)
    say(f"installing {len(lock.splitlines())} packages with uv on {names} (once)")
    if left := editable_packages():
        say(
            f"not installed on {names}: {', '.join(left)}, in editable mode on this machine. If "
            "the run imports it, put its folder next to the notebook, or install a release of it"
        )
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in (("make/lock.txt", lock), (f"make/{WHEEL}", wheel)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    sent = data.getvalue()
    receive = shlex.join(
        [
            inspect.getsource(remote),
            "receive",
            folder,
            str(len(sent)),
            hashlib.sha256(sent).hexdigest(),
        ]
    )
    make = MAKE.format(
        folder=quote(folder), python=quote(settings.python), wheel=WHEEL, digest=digest
    )
    command = (
        f"mkdir -p -m 700 {quote(folder)} && {quote(settings.python)} -c {receive} && "
        f"sh -c {shlex.quote(make)}"
    )
    made = ask_hosts(
        transport, dict.fromkeys(old, (command, sent)), timeout=LONGEST, cancelled=cancelled
    )
    if cancelled():
        raise Cancelled
    problems = [
        (report.names[host], answer.errors or answer.problem())
        for host, answer in made.items()
        if answer.problem()
    ]
    if problems:
        raise HostsError(report.place.name, tuple(problems))
