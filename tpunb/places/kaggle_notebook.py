"""Writes the notebook that is pushed to Kaggle: the run's script, readable, and tpunb, packed.

    [markdown]  a description
    [code]      %%writefile script.py, and the script
    [code]      everything else, packed; folded away on the page
    [code]      the notebook's %tpu_data lines, if it has any
    [code]      the run, with its log as output

The notebook needs no internet access, and on Kaggle only the packages torch and torch_xla.
"""

from __future__ import annotations

import base64
import io
import json
import lzma
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat

from tpunb.places.kaggle_session import FOLDER, ORDER
from tpunb.runs.directory import RunDir
from tpunb.utils.files import PACKAGE_ROOT
from tpunb.utils.version import __version__

SENT = ("spec.json", "parameters.json", "arguments.pt", "arguments.json", "given")
"""Files of a run folder, in addition to the script, that the run's processes read."""
_LEFT_OUT = (
    "display",
    "notebook/capture",
    "notebook/convert",
    "notebook/lint/checks",
    "notebook/migrate",
    "sweeps",
)
"""Parts of the package that are needed only to send a notebook."""
_UNPACK = '''\
# tpunb {version} and what this run needs besides its script, packed
import base64, io, sys, tarfile, tempfile

_packed = """
{packed}
"""
sys.path.insert(0, tempfile.mkdtemp(prefix="tpunb-"))
_packed = base64.b85decode("".join(_packed.split()))
# Pythons before 3.10.12 and 3.11.4 have no filters.
_safely = {{"filter": "data"}} if hasattr(tarfile, "data_filter") else {{}}
with tarfile.open(fileobj=io.BytesIO(_packed), mode="r:xz") as _sent:
    _sent.extractall(sys.path[0], **_safely)
from tpunb.places import kaggle_session'''
_WIDTH = 120
_HIDDEN = {"_kg_hide-input": True, "jupyter": {"source_hidden": True}}


def write_notebook(
    run: RunDir,
    name: str,
    order: Mapping[str, Any],
    data: Sequence[Sequence[str]] = (),
    files: Mapping[str, Path] | None = None,
) -> str:
    """Write the notebook of a run, as JSON text.

    `name`: the name of the user's notebook; `order`: values for `kaggle_session.run`; `data`: the
    words of each %tpu_data line; `files`: other files, keyed by path in the working directory.
    """
    script = run.script.read_text(encoding="utf-8")
    parts = ", ".join(f"`{path}`" for path in files or ())
    beside = f" It was sent with {parts}." if parts else ""
    about = (
        f"# {name}\n\nRun `{run.id}`, sent by tpunb {__version__}. The script below is the "
        f"notebook up to its `%%tpu_train` cell, cell by cell.{beside} The last cell runs it on "
        "all cores; its output is the run's log. The run's folder, with checkpoints, is in the "
        f"output as `{FOLDER}`."
    )
    cells = [
        nbformat.v4.new_markdown_cell(about),
        nbformat.v4.new_code_cell(f"%%writefile script.py\n{script}"),
        nbformat.v4.new_code_cell(_unpack(run, order, files or {}), metadata=_HIDDEN),
    ]
    if data:
        lines = (f"kaggle_session.bring({', '.join(map(repr, words))})" for words in data)
        cells.append(nbformat.v4.new_code_cell("\n".join(lines)))
    cells.append(nbformat.v4.new_code_cell("kaggle_session.run()"))
    # Papermill, which runs the notebook on Kaggle, needs the kernel's name. Metadata of Kaggle's
    # own are left out: an image named in them would replace that of a TPU session.
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return str(nbformat.writes(nbformat.v4.new_notebook(cells=cells, metadata=metadata)))


def sent_files(run: RunDir) -> dict[str, Path]:
    """The files of a run folder to pack, keyed by their path in it."""
    paths = [path for name in SENT for path in (run.path / name, *(run.path / name).rglob("*"))]
    return {str(path.relative_to(run.path)): path for path in paths if path.is_file()}


def _unpack(run: RunDir, order: Mapping[str, Any], files: Mapping[str, Path]) -> str:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", dereference=True) as archive:
        package = Path(PACKAGE_ROOT, "tpunb")
        for path in sorted(package.rglob("*")):
            inside = path.relative_to(package).as_posix()
            skipped = inside.startswith(tuple(f"{each}/" for each in _LEFT_OUT))
            if path.is_file() and "__pycache__" not in path.parts and not skipped:
                _add(archive, f"tpunb/{inside}", path.read_bytes())
        for name, path in sent_files(run).items():
            _add(archive, f"run/{name}", path.read_bytes())
        for name, path in files.items():
            _add(archive, f"files/{name}", path.read_bytes())
        _add(archive, ORDER, json.dumps(dict(order)).encode())
    packed = base64.b85encode(lzma.compress(data.getvalue())).decode()
    return _UNPACK.format(version=__version__, packed="\n".join(_wrapped(packed)))


def _wrapped(text: str) -> list[str]:
    return [text[start : start + _WIDTH] for start in range(0, len(text), _WIDTH)]


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a file without owner and time, so that the same content is packed identically."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o644
    archive.addfile(member, io.BytesIO(data))
