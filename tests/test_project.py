"""The project's files agree with each other, and the package is what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import tpunb
from tests import readme

tomllib = pytest.importorskip("tomllib", reason="in the standard library from Python 3.11 on")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_environment_yml_gives_the_versions_of_pyproject(pyproject: dict[str, Any]) -> None:
    *conda, last = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert {"python=3.11", "pip", "make", "git"} == set(conda)
    assert last["pip"][-1] == "-e ."

    extras = pyproject["project"]["optional-dependencies"]
    wanted = [*pyproject["project"]["dependencies"]]
    for extra in ("xla", "kaggle", "demo"):
        wanted += extras[extra]
    assert sorted(last["pip"][:-1]) == sorted(wanted)


def test_the_installed_environment_satisfies_every_requirement(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    groups = pyproject["dependency-groups"]
    _, *dev = groups["dev"]  # the first one includes the group "test"
    wanted = [*pyproject["project"]["dependencies"], *groups["test"], *dev, *groups["docs"]]
    for extra in ("xla", "kaggle", "demo"):
        wanted += extras[extra]
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue  # of another Python
        version = metadata.version(requirement.name)
        assert requirement.specifier.contains(version, prereleases=True), str(requirement)


def test_each_line_of_the_readme_s_table_has_its_scenarios() -> None:
    """Those that `make test` runs; tests/conftest.py fails if one of them does not exist."""
    table = (ROOT / "README.md").read_text().split("## What it does for you\n")[1].split("\n## ")[0]
    titles = re.findall(r"^\| ([^|*]+) \| ", table, re.MULTILINE)
    assert titles == list(readme.ROWS)
    assert all(readme.ROWS.values())


def test_the_given_packages_are_there(pyproject: dict[str, Any]) -> None:
    listed = [*pyproject["project"]["dependencies"]]
    for extra in pyproject["project"]["optional-dependencies"].values():
        listed += extra
    given = {"torch", "torch_xla", "ipykernel", "nbconvert", "papermill", "ipywidgets", "kaggle"}
    assert given <= {Requirement(text).name for text in listed}


def test_tpunb_alone_never_replaces_the_torch_of_a_platform(pyproject: dict[str, Any]) -> None:
    core = {Requirement(text).name for text in pyproject["project"]["dependencies"]}
    assert not core & {"torch", "torch_xla", "accelerate", "scikit-learn"}


def test_the_xla_and_tpu_extras_name_the_same_pair(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    pairs = [
        {(r.name, str(r.specifier)) for r in map(Requirement, extras[name]) if "==" in str(r)}
        for name in ("xla", "tpu")
    ]
    assert pairs[0] == pairs[1]


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize(
    "statement", ["import tpunb", "import tpunb.kernel.magics", "import tpunb.cli"]
)
def test_importing_is_light(statement: str) -> None:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "tpunb" in loaded
    heavy = {"torch", "torch_xla", "nbconvert", "papermill", "pandas", "sklearn"}
    assert not loaded & heavy


@pytest.mark.usefixtures("starts_processes")
def test_the_wheel_holds_what_is_needed_and_nothing_else(
    tmp_path: Path, pyproject: dict[str, Any]
) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        info = f"tpunb-{tpunb.__version__}.dist-info"
        meta = Parser().parsestr(file.read(f"{info}/METADATA").decode())
        entry_points = file.read(f"{info}/entry_points.txt").decode()

    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tpunb").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "tpunb/py.typed" in sources
    assert sources == {name for name in names if not name.startswith(info)}
    assert not [name for name in names if "fake" in name]
    assert f"{info}/licenses/LICENSE" in names

    assert (meta["Name"], meta["Version"]) == ("tpunb", tpunb.__version__)
    assert set(meta["Requires-Python"].split(",")) == {">=3.10", "<3.14"}
    assert meta["License-Expression"] == "Apache-2.0"
    extras = pyproject["project"]["optional-dependencies"]
    assert set(meta.get_all("Provides-Extra", [])) == set(extras)
    assert "tpunb = tpunb.cli:main" in entry_points
