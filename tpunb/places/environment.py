"""`environment = "make"`: installs this interpreter's packages on every host with uv."""

from __future__ import annotations

import hashlib
import json
import shlex
from importlib import metadata

from tpunb.places import archive
from tpunb.places.check import HostsReport, quote
from tpunb.places.errors import HostsError
from tpunb.places.place import Cancelled, Check, Say
from tpunb.places.transport import Transport, ask_hosts, receiver
from tpunb.utils.version import __version__, package_digest

LONGEST = 3600.0
"""Time-out of the installation in seconds."""
_LEFT_OUT = ("tpunb", "pip", "setuptools", "uv")
_NVIDIA = ("nvidia-", "triton")
"""Prefixes of torch's packages for CUDA, which a TPU host does not need."""

MAKE = """
set -eu
cd {folder}
uv=$(command -v uv || echo "$HOME/.local/bin/uv")
test -x "$uv" || {{ echo 'uv is not installed: python3 -m pip install --user uv' >&2; exit 1; }}
rm -f env/made
"$uv" venv --quiet --allow-existing --python {python} env
"$uv" pip install --quiet --python env/bin/python --no-deps --torch-backend=cpu -r make/lock.txt
site=$(env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$site"/tpunb "$site"/tpunb-*.dist-info
cp -R make/package/* "$site"
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


def make_environment(
    transport: Transport,
    report: HostsReport,
    say: Say,
    cancelled: Check,
) -> None:
    """Install this interpreter's packages on every host that does not have them yet.

    Raises HostsError for hosts where the installation fails, and Cancelled.
    """
    settings = report.place.host_settings
    tpu = any(host.machine.chips or host.chips_seen for _, host in report.answered)
    lock = write_lock(tpu=tpu).encode()
    digest = hashlib.sha256(lock + package_digest().encode()).hexdigest()[:16]
    hosts = range(len(transport.hosts))
    folder = settings.folder.rstrip("/")
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
    described = metadata.distribution("tpunb").read_text("METADATA") or ""
    package = {
        **archive.own_package(),
        f"tpunb-{__version__}.dist-info/METADATA": described.encode(),
    }
    sent = archive.pack(
        {
            "make/lock.txt": lock,
            **{f"make/package/{name}": content for name, content in package.items()},
        },
        "gz",
    )
    python = quote(settings.python)
    make = MAKE.format(folder=quote(folder), python=python, digest=digest)
    command = (
        f"mkdir -p -m 700 {quote(folder)} && rm -rf {quote(folder + '/make')} && "
        f"{receiver(python, folder, sent)} && sh -c {shlex.quote(make)}"
    )
    made = ask_hosts(
        transport, dict.fromkeys(old, (command, sent)), timeout=LONGEST, cancelled=cancelled
    )
    if cancelled():
        raise Cancelled
    if problems := [
        (report.names[host], answer.errors or answer.problem)
        for host, answer in made.items()
        if answer.problem
    ]:
        raise HostsError(report.place.name, tuple(problems))
