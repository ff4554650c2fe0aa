"""The shape of the code: packages, names that no checker sees, enums instead of sentences."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tpunb"
MODULES = sorted(PACKAGE.rglob("*.py"))

OTHERS_TEXT = {
    "diagnostics/failure": "logs of any program",
    "display/log_view.py": "lines of gloo and debugpy, which are left out",
    "utils/memory.py": "the kernel's log and cgroup files",
    "utils/processes.py": "/proc",
    "worker/cells.py": "Python's own SyntaxError",
    "worker/supervisor/outcome.py": "fatal lines of C++ libraries, and Python's tracebacks",
    "worker/supervisor/stacks.py": "faulthandler's stacks",
}
"""What reads texts that tpunb did not write, and whose they are."""

READING = frozenset(
    "startswith endswith find rfind index partition rpartition removeprefix removesuffix match "
    "search fullmatch compile findall finditer".split()
)
SENTENCE = re.compile(r"[A-Za-z]{2,} [a-z(]|^[a-z]+ $")


def _words(node: ast.AST) -> Iterator[ast.Constant]:
    """Sentences that are compared with: a string, parts of an f-string, or several in brackets."""
    if isinstance(node, ast.Call):
        return
    for inner in (node, *ast.iter_child_nodes(node)):
        if (
            isinstance(inner, ast.Constant)
            and isinstance(inner.value, str)
            and SENTENCE.search(inner.value)
        ):
            yield inner


def test_the_top_level_is_small() -> None:
    entries = [path.name for path in PACKAGE.iterdir() if not path.name.startswith("__")]
    assert len(set(entries) - {"py.typed"}) <= 15, sorted(entries)


def test_nothing_is_decided_from_the_wording_of_a_message() -> None:
    """Enums and fields decide. What reads others' texts is named above, with whose they are."""
    compared = []
    for path in MODULES:
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith(tuple(OTHERS_TEXT)):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                read = node.args[:1] if node.func.attr in READING else []
            else:
                read = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            compared += [f"{place}:{w.lineno}: {w.value!r}" for part in read for w in _words(part)]
    assert not compared


def test_only_what_knows_the_backend_advises_torch_xla() -> None:
    """Rules and lint are checked for each backend (tests/foreign.py); these ask for it."""
    found = set()
    for path in MODULES:
        name = str(path.relative_to(PACKAGE))
        if name.startswith(("backends/xla/", "notebook/", "diagnostics/")):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and id(node) not in documented:
                found |= {name} if re.search(r"\bx[mrs]\.\w|torch_xla\.\w+\(", text) else set()
    assert found == {
        "runs/summary.py",
        "training/collectives.py",
        "training/inference.py",
    }


def test_values_of_running_functions_are_read_in_one_module() -> None:
    """Which lets go of them: before Python 3.13 `f_locals` keeps what it has read alive."""
    readers = [path for path in ROOT.glob("tpunb/**/*.py") if ".f_locals" in path.read_text()]
    assert readers == [ROOT / "tpunb/utils/frame_locals.py"]


def test_a_class_name_means_one_thing() -> None:
    defined: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    assert not {name: places for name, places in defined.items() if len(places) > 1}


WITHOUT_TORCH = """
import importlib, pkgutil, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torch_xla", "torch_tpu"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for package in sys.argv[1:]:
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(getattr(found, "__path__", []), f"{package}."):
        if ".templates" not in module.name:
            importlib.import_module(module.name)
            print(module.name)
"""


@pytest.mark.usefixtures("starts_processes")
def test_what_knows_no_backend_imports_without_any() -> None:
    names = "data display kernel machine notebook places runs utils worker.supervisor"
    names += " diagnostics.failure backends.base backends.choice backends.current"
    packages = [f"tpunb.{name}" for name in names.split()]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *packages], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 150


def _docstrings(tree: ast.AST) -> set[ast.AST]:
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def _resolves(dotted: str) -> bool:
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            if not hasattr(found, name):
                return False
            if name == "last_run":  # None until there is one
                return True
            found = getattr(found, name)
        return True
    return False


def test_modules_that_are_named_in_strings_exist() -> None:
    """Import checkers do not see them: `python -c` commands, lazy imports, tables of types."""
    missing = []
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = _docstrings(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if node in docstrings:
                continue
            names = re.findall(r"(?<![\w./])tpunb(?:\.[a-z_]+)+\b", node.value)
            names += [
                f"{package}.{name}"
                for package, name in re.findall(r"from (tpunb[\w.]*) import (\w+);", node.value)
            ]
            missing += [f"{path.name}:{node.lineno}: {n}" for n in names if not _resolves(n)]
            missing += [
                f"{path.name}:{node.lineno}: {file}"
                for file in re.findall(r"(?<![\w./])tpunb/[\w/]+\.py", node.value)
                if not (ROOT / file).exists()
            ]
    assert not missing


def test_architecture_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    page += (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py|(?:[a-z_]+/)+)`", page))
    assert named
    missing = {
        name for name in named if not any((base / name).exists() for base in (ROOT, PACKAGE))
    }
    assert not missing


def test_tests_mirror_modules() -> None:
    """By the name of a module or package, and maybe an aspect; tests/scenarios is for the rest."""
    strays = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        folder = path.parent.relative_to(ROOT / "tests")
        if folder.parts[:1] in ((), ("scenarios",), ("long",)):
            continue
        if (PACKAGE / folder).with_suffix(".py").exists():
            continue  # a folder for one module
        words = path.stem.removeprefix("test_").split("_")
        stems = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
        named = folder.name in stems or any((PACKAGE / folder / f"{s}.py").exists() for s in stems)
        if not named:
            strays.append(str(path.relative_to(ROOT)))
    assert not strays
