"""`make matrix`: the environments that platforms have, and the extremes.

    python tests/matrix.py [--lists FOLDER] [--preludes] [NAME …]

One after the other, each in a virtual environment of its own that is removed afterwards (9 GB,
for the time being), with the wheel as users install it. In each, one kernel does everything that
tests/drivers/tour.py has. Prints a row of a table for each.

Debian and Ubuntu: the README's commands and the doctor's in a root, without torch
(tests/drivers/roots.py; this takes root and debootstrap). Colab and Kaggle: from the lists that
they publish, as of the commits below. They are downloaded, or taken from FOLDER. `--preludes`: also
fork after what preludes do with each library that is there (docs/forks.md). uv finds the
interpreters, or brings them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.parser import Parser
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.drivers import preludes, roots, tour  # noqa: E402 - found by the line above

UV = str(Path(sys.executable).with_name("uv"))


@dataclass(frozen=True)
class Published:
    """A file in a platform's own repository."""

    repository: str
    commit: str
    path: str

    def read(self, lists: Path | None) -> str:
        """`lists`: a folder that has the file, or None to download it."""
        if lists is not None:
            return (lists / PurePosixPath(self.path).name).read_text(encoding="utf-8")
        address = f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"
        with urllib.request.urlopen(address, timeout=60) as answer:
            return str(answer.read().decode())


COLAB = Published(  # 2026-08-19
    "googlecolab/backend-info", "a72407924822ea377410b69f0a290150bcb5c9c2", "pip-freeze.tpu.txt"
)
KAGGLE, KAGGLE_VERSIONS = (  # 2026-08-12
    Published("Kaggle/docker-python", "78aaa43f8cc8e6b01bbaa5a56c39b4a2f61a8277", path)
    for path in ("tpu/requirements.in", "tpu/config.txt")
)
KAGGLE_GPU = Published(
    "Kaggle/docker-python", "01d659bb3e2b2b048752d1670cfd7f51b9dc6d92", "kaggle_requirements.txt"
)
OF_JUPYTER = ("ipywidgets", "jupyter_server", "jupyterlab", "kaggle", "nbconvert", "papermill")
"""Packages of that list, which Colab's GPU image has besides, that tpunb needs or runs beside."""
LEFT_OUT = {
    "dbus-python": "is compiled with Ubuntu's D-Bus",
    "GDAL": "is compiled with Ubuntu's GDAL",
    "PyGObject": "is compiled with Ubuntu's GObject",
    "python-apt": "is Ubuntu's own",
    "rpy2": "is compiled with R",
    "en_core_web_sm": "spaCy's model: no package of the registry",
    "google-colab": "no package of the registry",
    "jupyter_kernel_gateway": "Colab's own version: no package of the registry",
    "dm-haiku": "from a git repository",
    "tunix": "from a git repository",
    "qwix": "from a git repository",
}
"""What is in the lists and not in the environments here. The images' torch is built for the CPU
(+cpu), the registry's with CUDA."""


def requirements(text: str, versions: str = "") -> Iterator[str]:
    """The requirements of a published list, less those in `LEFT_OUT`.

    A wheel's address becomes its release. `versions`: lines NAME=VALUE for ${NAME} in the list.
    """
    from packaging.utils import parse_wheel_filename

    pairs = (line.split("=", 1) for line in versions.splitlines() if re.match(r"\w+=", line))
    for line in string.Template(text).safe_substitute(dict(pairs)).splitlines():
        line = line.strip()
        name, _, address = (part.strip() for part in line.partition(" @ "))
        address = address or (name if "://" in name else "")
        if not name or name.startswith("#"):
            continue
        if address.startswith(("git+", "file:")):
            name = name if name != address else address.rsplit("/", 1)[-1]
        elif address:
            file = PurePosixPath(urlsplit(address).path).name
            name, version, *_ = parse_wheel_filename(unquote(file))
            line = f"{name}=={version.public}"
        if re.split(r"[=<>@ ]", name.replace("-", "_"))[0] not in _LEFT_OUT:
            yield line


_LEFT_OUT = {name.replace("-", "_") for name in LEFT_OUT}


@dataclass(frozen=True)
class Environment:
    """How one is made. What its image sets is in `env`."""

    python: str
    install: Callable[[Path | None], list[str]]
    """uv's arguments."""
    extras: str = ""
    """Of tpunb, which is installed after that, or with it."""
    together: bool = False
    """tpunb is installed in the same command; else as people do on the platform: it must not
    replace what is there."""
    env: dict[str, str] = field(default_factory=dict)
    torchtpu: bool = False
    """It has a torch for TorchTPU, and no torch_xla."""


def _torchtpu(*packages: str) -> Environment:
    return Environment("3.12", lambda _: [*packages], "[demo]", together=True, torchtpu=True)


ENVIRONMENTS = {
    "Colab": Environment("3.13", lambda lists: [*requirements(COLAB.read(lists))]),
    "Kaggle": Environment(
        "3.12",
        lambda lists: [
            "--prerelease=allow",  # as in its Dockerfile
            *requirements(KAGGLE.read(lists), KAGGLE_VERSIONS.read(lists)),
        ],
        env={"ISTPUVM": "1", "TPU_PROCESS_ADDRESSES": "local"},
    ),
    "Kaggle-GPU": Environment(
        "3.12",
        lambda lists: [
            *("torch==2.11.0", "pandas", "scikit-learn", "matplotlib", "safetensors"),
            *(each for each in requirements(KAGGLE_GPU.read(lists)) if each.startswith(OF_JUPYTER)),
        ],
        torchtpu=True,
    ),
    "newest": Environment(
        "3.13", lambda _: ["torch_xla", "torch==2.9.0", "--upgrade"], "[demo]", together=True
    ),
    "oldest": Environment(
        "3.10",
        lambda _: [
            *("torch==2.8.0", "torch_xla==2.8.0", "numpy==1.26.4"),
            *("--resolution", "lowest-direct"),
        ],
        "[demo]",
        together=True,
    ),
    "torch-2.11": _torchtpu("torch==2.11.0"),
    "torch-newest": _torchtpu("torch<2.16", "--upgrade"),
    "torch_tpu": _torchtpu("torch==2.13.0", "torch_tpu==0.2.0"),
}
SHOWN = (
    "torch",
    "torch_xla",
    "torch_tpu",
    "numpy",
    "pandas",
    "pyarrow",
    "scikit-learn",
    "ipython",
    "ipykernel",
    "ipywidgets",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    names = ", ".join([*ENVIRONMENTS, *roots.ROOTS])
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument("--lists", type=Path, metavar="FOLDER")
    parser.add_argument("--preludes", action="store_true")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(prefix="tpunb-matrix-") as temporary:
        folder = Path(temporary)
        wheel = build_wheel(folder)
        print(f"| environment | Python | packages | {' | '.join(SHOWN)} | installed in | works |")
        print("|---" * (len(SHOWN) + 5) + "|", flush=True)
        for name in options.names or [*ENVIRONMENTS, *roots.ROOTS]:
            with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=folder) as made:
                if name in roots.ROOTS:
                    row, problems = _visit(name, Path(made), wheel)
                else:
                    row, problems = _try(ENVIRONMENTS[name], Path(made), wheel, options)
            print(f"| {name} | {row} |", flush=True)
            for problem in problems:
                print(problem, file=sys.stderr, flush=True)
            failed = failed or bool(problems)
    sys.exit(failed)


def _try(
    environment: Environment, folder: Path, wheel: Path, options: argparse.Namespace
) -> tuple[str, list[str]]:
    """Make the environment and take the tour in it: the rest of its row, and what is wrong."""
    began = time.monotonic()
    python, replaced = make(environment, folder / "venv", wheel, options.lists)
    took = time.monotonic() - began
    problems = [f"`pip install tpunb` replaces {package}" for package in replaced]
    began = time.monotonic()
    found = tour.visit(python, folder / "tour", environment.env, torchtpu=environment.torchtpu)
    toured = time.monotonic() - began
    problems += [f"{stop}:\n{error}" for stop, error in found.items() if error]
    good = [stop for stop, error in found.items() if not error]
    works = "all" if len(good) == len(found) else f"{', '.join(good) or 'nothing'}"
    if options.preludes:
        for library, what in preludes.measure(python, folder).items():
            print(f"{library}: {what}", flush=True)
    have = installed(python)
    version = _run([str(python), "-c", "import platform; print(platform.python_version())"])
    shown = [have.get(name.replace("_", "-"), "") for name in SHOWN]
    return " | ".join(
        [version.strip(), str(len(have)), *shown, f"{took:.0f} s", f"{works}, {toured:.0f} s"]
    ), problems


def _visit(name: str, folder: Path, wheel: Path) -> tuple[str, list[str]]:
    """The same for a root, in which there is no torch."""
    began = time.monotonic()
    found = dict(roots.visit(folder / "root", name, wheel))
    good = [what for what, error in found.items() if not error]
    works = "all" if len(good) == len(found) else ", ".join(good) or "nothing"
    took = time.monotonic() - began
    return " | ".join(["", "", *("" for _ in SHOWN), f"{took:.0f} s", works]), [
        f"{name}, {what}:\n{error}" for what, error in found.items() if error
    ]


def build_wheel(folder: Path) -> Path:
    """tpunb's, of this working tree."""
    _run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)])
    [wheel] = folder.glob("tpunb-*.whl")
    return wheel


def make(
    environment: Environment, folder: Path, wheel: Path, lists: Path | None
) -> tuple[Path, list[str]]:
    """Its interpreter, and the packages that installing tpunb has replaced there."""
    _run([UV, "venv", "--quiet", "--python", environment.python, str(folder)])
    python = folder / "bin/python"
    install = [UV, "pip", "install", "--quiet", "--python", str(python)]
    ours = f"tpunb{environment.extras} @ {wheel.as_uri()}"
    wanted = environment.install(lists)
    if environment.together:
        # uv takes the lowest releases of what it is asked for itself only.
        _run([*install, ours, *requires(wheel), *wanted])
        return python, []
    _run([*install, *wanted])
    before = installed(python)
    _run([*install, ours])
    after = installed(python)
    return python, [name for name in before if after.get(name) != before[name]]


def requires(wheel: Path) -> list[str]:
    """What the wheel says that tpunb and its notebooks need."""
    from packaging.requirements import Requirement

    with zipfile.ZipFile(wheel) as file:
        [name] = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        lines = Parser().parsestr(file.read(name).decode()).get_all("Requires-Dist", [])
    needs = map(Requirement, lines)
    wanted = [n for n in needs if not n.marker or n.marker.evaluate({"extra": "demo"})]
    return [str(need).partition(";")[0].strip() for need in wanted]


def installed(python: Path) -> dict[str, str]:
    """The versions in an environment, by name."""
    listed = _run([UV, "pip", "list", "--format", "json", "--python", str(python)])
    return {package["name"]: package["version"] for package in json.loads(listed)}


def _run(command: list[str]) -> str:
    # pyenv's commands work only for the versions that it is told to use.
    wanted = command[command.index("--python") + 1] if "--python" in command else ""
    env = os.environ | ({"PYENV_VERSION": wanted} if re.fullmatch(r"[\d.]+", wanted) else {})
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
