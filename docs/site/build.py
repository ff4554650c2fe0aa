"""`make docs`: the site, in out/docs; open out/docs/index.html, it needs no server and no network.

Each notebook is executed with `tpunb run`, as it stands, and its executed copy is kept until the
notebook, one that it names, or tpunb changes. The notebooks in git stay without outputs.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import nbformat
from sphinx.cmd.build import build_main

from tpunb.notebook.convert.stack import written_for

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXECUTED = ROOT / ".docs_cache"
"""Executed copies, by the paths of their notebooks."""
TORCHTPU_PYTHON = ROOT / ".venv-torchtpu/bin/python"
KEY = "tpunb_docs_key"
"""In an executed copy's metadata: what it was made from."""


def main() -> int:
    """Execute what has changed, then build. The status is 1 if a notebook or a page is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saved", action="store_true", help="show the notebooks without outputs")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "docs", metavar="DIR")
    options = parser.parse_args()
    failed = [] if options.saved else [path for path in notebooks() if not execute(path)]
    if failed:
        return 1
    return build(options.out, None if options.saved else EXECUTED)


def build(out: Path, executed: Path | None = None) -> int:
    """Write the site to `out`; a warning is an error.

    `executed`: where the executed notebooks are; without it, the saved ones are shown.
    """
    how = ["--quiet", "--fail-on-warning", "--keep-going", "--jobs", "auto", "-c", str(HERE)]
    status = build_main([*how, "-D", f"executed={executed or ''}", str(ROOT), str(out)])
    if status == 0:
        shutil.copy(out / "README.html", out / "index.html")
        print(f"wrote {out / 'index.html'}")
    return status


def notebooks() -> list[Path]:
    """All of the project's, by their paths in it."""
    found = (ROOT / "notebooks").rglob("*.ipynb")
    paths = (path.relative_to(ROOT) for path in found)
    return sorted(path for path in paths if not {"runs", ".ipynb_checkpoints"} & set(path.parts))


def execute(notebook: Path) -> bool:
    """Run a notebook unless its copy is of today; False, with its output, if it has failed."""
    copy, key = EXECUTED / notebook, key_of(notebook)
    if copy.exists() and nbformat.read(copy, as_version=4).metadata.get(KEY) == key:
        return True
    print(f"executing {notebook} …", flush=True)
    with tempfile.TemporaryDirectory(prefix="tpunb-docs-") as folder:
        for other in notebooks():
            place = folder / other
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / other, place)
        cwd = (folder / notebook).parent
        command = [python_of(notebook), "-m", "tpunb", "run", notebook.name, "executed.ipynb"]
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
        if done.returncode:
            print(f"{done.stdout}\n{done.stderr}\n{notebook} failed", file=sys.stderr)
            return False
        executed = nbformat.read(cwd / "executed.ipynb", as_version=4)
    executed.metadata[KEY] = key
    executed.metadata.pop("widgets", None)  # a page shows what the widgets have left as HTML
    copy.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(executed, copy)
    return True


def python_of(notebook: Path) -> str:
    """The Python that executes a notebook: TorchTPU's torch is in an environment of its own."""
    cells = nbformat.read(ROOT / notebook, as_version=4).cells
    stack = written_for([cell.source for cell in cells if cell.cell_type == "code"])
    return str(TORCHTPU_PYTHON) if stack == "torchtpu" else sys.executable


def key_of(notebook: Path) -> str:
    """Of everything that decides what a notebook shows: also the notebooks that it runs."""
    text = (ROOT / notebook).read_text(encoding="utf-8")
    named = [p for p in notebooks() if p != notebook and p.name in text]
    return digest([notebook, *named, *sorted((ROOT / "tpunb").rglob("*.py"))])


def digest(paths: Iterable[Path]) -> str:
    """Of the contents."""
    parts = (hashlib.sha256((ROOT / path).read_bytes()).digest() for path in paths)
    return hashlib.sha256(b"".join(parts)).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
