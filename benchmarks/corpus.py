"""Convert, lint and migrate public notebooks; prints a Markdown table.

`python -m benchmarks.corpus CLONES`: CLONES is a folder with a clone of each repository of
`corpus.txt`, as `owner+name` or `owner+name/repo`. The notebooks are neither kept nor executed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import v4

from tpunb.errors import ConversionError
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.files import load_snapshot
from tpunb.notebook.lint.linter import lint
from tpunb.notebook.migrate import migrate_text

LIST = Path(__file__).with_name("corpus.txt")


@dataclass
class Row:
    """One notebook and its results."""

    name: str
    converted: str
    findings: Counter[str]
    changed: int
    marked: int
    after: str
    left: Counter[str]


def main() -> None:
    clones = Path(sys.argv[1])
    rows = []
    with tempfile.TemporaryDirectory(prefix="tpunb-corpus-") as folder:
        for line in LIST.read_text().splitlines():
            if not line.startswith("#"):
                repository, commit, path = line.split(" ", 2)
                text = _text(clones, repository, commit, path)
                rows.append(_row(f"{repository} {path} @{commit}", text, Path(folder)))
    print(report(rows))


def _text(clones: Path, repository: str, commit: str, path: str) -> str:
    folder = clones / repository.replace("/", "+")
    folder = folder / "repo" if (folder / "repo").is_dir() else folder
    command = ["git", "-C", str(folder), "show", f"{commit}:{path}"]
    text = subprocess.run(command, capture_output=True, check=True).stdout.decode(errors="replace")
    return text if path.endswith(".ipynb") else nbformat.writes(from_export(text))


def from_export(text: str) -> nbformat.NotebookNode:
    """Rebuild the notebook that Kaggle exported as a script: its code cells, with their magics."""
    parts = re.split(r"^# In\[[ \d]*\]:\n", text, flags=re.MULTILINE)[1:]
    return v4.new_notebook(cells=[v4.new_code_cell(_with_magics(part.strip())) for part in parts])


def _with_magics(cell: str) -> str:
    try:
        tree = ast.parse(cell)
    except SyntaxError:
        return cell
    lines = cell.split("\n")
    for node in reversed([node for node in ast.walk(tree) if isinstance(node, ast.Expr)]):
        match node.value:
            case ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Name("get_ipython")), attr=method),
                args=arguments,
            ):
                values = [ast.literal_eval(argument) for argument in arguments]
                forms = {
                    "system": "!{}",
                    "run_line_magic": "%{} {}",
                    "run_cell_magic": "%%{} {}\n{}",
                }
                magic = forms[method].format(*values).rstrip()
                lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + magic]
    return "\n".join(lines)


def _row(name: str, text: str, folder: Path) -> Row:
    path = folder / "notebook.ipynb"
    path.write_text(text, encoding="utf-8")
    snapshot = load_snapshot(path)
    converted = _converted(path)
    migrated, migration = migrate_text(text)
    if migrate_text(migrated)[0] != migrated:
        raise AssertionError(f"a second migration changes {name}")
    path.write_text(migrated, encoding="utf-8")
    kinds = Counter(change.kind for change in migration.changes)
    return Row(
        name,
        converted,
        Counter(finding.severity for finding in lint(snapshot)),
        kinds["rewritten"],
        kinds["marked"],
        _converted(path),
        Counter(finding.severity for finding in lint(load_snapshot(path))),
    )


def _converted(path: Path) -> str:
    """'yes', or the reason why not. Raises SyntaxError if the script does not compile: a bug."""
    try:
        script = convert(load_snapshot(path))
    except ConversionError as error:
        return str(error).splitlines()[0]
    compile(script.text, "script.py", "exec")
    return "yes"


def report(rows: list[Row]) -> str:
    """The table, below a line with the sums."""
    total: Counter[str] = Counter()
    lines = [
        "| notebook | converts | error / warning / hint | rewritten / marked | converts after | "
        "error / warning / hint after |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        total["converted"] += row.converted == "yes"
        total["after"] += row.after == "yes"
        lines.append(
            f"| {row.name} | {_cell(row.converted)} | {_three(row.findings)} | {row.changed} / "
            f"{row.marked} | {_cell(row.after)} | {_three(row.left)} |"
        )
    head = (
        f"{len(rows)} notebooks: {total['converted']} convert as they are, "
        f"{total['after']} after `tpunb migrate`."
    )
    return "\n".join([head, "", *lines])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _three(found: Counter[str]) -> str:
    return " / ".join(str(found[severity]) for severity in ("error", "warning", "hint"))


if __name__ == "__main__":
    main()
