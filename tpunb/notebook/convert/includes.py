"""Files named by `%run`: notebooks are included, Python files must exist when the script runs."""

from __future__ import annotations

import ast
import os.path
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tpunb.notebook.convert import cells, front_end, magics, statements
from tpunb.notebook.convert.cells import EditedCell
from tpunb.notebook.convert.magics import NotPythonError
from tpunb.notebook.errors import ConversionError
from tpunb.notebook.files import cell_magics
from tpunb.notebook.models import Omission
from tpunb.notebook.scopes import scopes_of


@dataclass
class IncludedFiles:
    """The files that a script runs with `%run`, and the parts of the header that they need."""

    folders: Sequence[str]
    """Folders that are searched for files, in this order."""
    setup: bool = False
    """True to convert setup lines in notebooks to Python (`setup_lines`)."""
    secrets: dict[str, str] | None = None
    """Secrets in an exported script by the environment variables that replace them."""
    notebooks: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Names and sources of the cells of each notebook that is run, by its name in `%run`."""
    trained: set[str] = field(default_factory=set)
    """Those of them that train cells run, in which their lines run, too."""
    omissions: list[Omission] = field(default_factory=list)
    """Parts of these notebooks that do not run, with the line numbers of the `%run`."""

    def include(self, source: str, number: int, train: bool = False, cwd: str = "") -> str:
        """Read the files that a cell in plain Python runs; return the cell with located paths.

        `cwd`: the folder in which the cell runs; '' for the first folder.

        Raises ConversionError, with the cell and the line of `%run`, if a file is missing or
        cannot be run.
        """
        if "_tpunb_run_" not in source:
            return source
        lines, here = source.split("\n"), cwd or self.folders[0]
        for node in ast.walk(statements.parse_cell(source, number)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            first = node.args[0] if node.args else None
            if node.func.id not in magics.RUN_HELPERS or not isinstance(first, ast.Constant):
                continue
            try:
                path = str(first.value)
                self._include(node.func.id, path, number, node.lineno, lines, train, here)
            except _NotRunError as error:
                line = lines[node.lineno - 1]
                raise ConversionError(str(error), number, node.lineno, line) from None
        return "\n".join(lines)

    def sources(self, words: Iterable[str]) -> list[str]:
        """Return the cells of the notebooks that contain one of the words."""
        every = [source for named in self.notebooks.values() for _, source in named]
        return [source for source in every if any(word in source for word in words)]

    def _include(
        self,
        helper: str,
        path: str,
        number: int,
        line: int,
        lines: list[str],
        train: bool,
        here: str,
    ) -> None:
        if helper == magics.RUN_MODULE:
            return
        file = self._locate(path, here)
        name = path
        if helper == magics.RUN_FILE:
            name = file
        elif here != self.folders[0]:
            name = os.path.join(here, file)  # elsewhere, the same name may mean another notebook
        lines[line - 1] = lines[line - 1].replace(repr(path), repr(name), 1)
        if helper == magics.RUN_FILE or name in (self.trained if train else self.notebooks):
            return
        # First, which ends the recursion for a notebook that runs itself.
        self.trained |= {name} if train else set()
        self.notebooks[name] = []
        self.notebooks[name] += self._convert(path, file, number, line, train, here)

    def _locate(self, path: str, here: str) -> str:
        """Return the path as seen from the folder in which the cell runs."""
        name, folders = os.path.expanduser(path), dict.fromkeys([here, *self.folders])
        for folder in folders:
            if os.path.isfile(full := os.path.join(folder, name)):
                return name if folder == here else full
        places = " or ".join(folders)
        raise _NotRunError(
            f"`%run` needs {path}, which does not exist in {places}. Give its path "
            f"from the working directory. {magics.OTHERWISE}"
        )

    def _convert(
        self, path: str, file: str, number: int, line: int, train: bool, here: str
    ) -> list[tuple[str, str]]:
        converted = []
        for place, source in _code(path, os.path.join(here, file)):
            try:
                plain = cells.plain_python(source, train, self.secrets, self.setup)
            except NotPythonError as error:
                raise _NotRunError(f"{place}, line {error.line}: {error}") from None
            cell = EditedCell(list(plain.lines), list(plain.left_out))
            try:
                tree = statements.parse_cell("\n".join(cell.lines), 0)
                names = scopes_of(tree)
                written = statements.rewrite_awaits("\n".join(cell.lines), tree, names)
                if written != "\n".join(cell.lines):
                    cell.lines, tree = written.split("\n"), statements.parse_cell(written, 0)
                front_end.FrontEndNames([tree]).leave_out(cell, tree)
                text = self.include("\n".join(cell.lines), 0, train, here)
                statements.check_compiles(text, 0, [])
            except ConversionError as error:
                raise _NotRunError(f"{place}, line {error.line}: {error.reason}") from None
            self.omissions += [
                Omission(number, line, f"{place}, line {row}: {what}", reason)
                for row, what, reason in sorted(cell.left_out)
            ]
            converted.append((place, text))
        return converted


class _NotRunError(Exception):
    """A file cannot be run; the message is the reason."""


def _code(path: str, file: str) -> list[tuple[str, str]]:
    """Return the code cells of a file for `%run`: 'other.ipynb, code cell 2', and the text."""
    name = Path(path).name
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
        if not path.lower().endswith(".ipynb"):
            return [(name, text.replace("\r\n", "\n"))]
        sources = _sources(text)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _NotRunError(f"`%run` cannot read {path}: {error}") from None
    named = [(f"{name}, code cell {at}", source) for at, source in enumerate(sources, 1)]
    return [(place, source) for place, source in named if source is not None]


def _sources(text: str) -> list[str | None]:
    """Return the sources of all code cells; None for cells that are left out of runs."""
    import nbformat

    notebook = nbformat.reads(text, as_version=4)
    sources: list[str | None] = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        tags = cell.metadata.get("tags", ())
        own = any(name.startswith("tpu_") for name in cell_magics(cell.source))
        left_out = own or cells.skip_reason(cell.source, tags)
        sources.append(None if left_out else cell.source.replace("\r\n", "\n"))
    return sources
