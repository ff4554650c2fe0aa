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
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat

from tpunb.places import archive
from tpunb.places.kaggle_session import FOLDER, ORDER
from tpunb.runs import stream
from tpunb.runs.directory import RunDir
from tpunb.utils.version import __version__

_LEFT_OUT = (
    "display",
    "notebook/capture",
    "notebook/convert",
    "notebook/lint/checks",
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


def run_files(run: RunDir) -> dict[str, Path | bytes]:
    """The files of a run folder, in addition to the script, that the run's processes read."""
    return archive.run_files(run, ("spec.json", *stream.INPUTS))


def _unpack(run: RunDir, order: Mapping[str, Any], files: Mapping[str, Path]) -> str:
    entries = {
        **archive.own_package(_LEFT_OUT),
        **{f"run/{name}": content for name, content in run_files(run).items()},
        **{f"files/{name}": path for name, path in files.items()},
        ORDER: json.dumps(dict(order)).encode(),
    }
    packed = base64.b85encode(archive.pack(entries, "xz")).decode()
    lines = (packed[start : start + _WIDTH] for start in range(0, len(packed), _WIDTH))
    return _UNPACK.format(version=__version__, packed="\n".join(lines))
