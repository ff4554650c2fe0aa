"""Output lines of commands: plain lists, unless code reads an attribute that a list lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook.convert.notebooks import lines_of, notebook, run
from tpunb.notebook.convert.convert import convert

PLAIN = "__import__(\"subprocess\").getoutput('ls').splitlines()"


def test_plain_lists_stay() -> None:
    script = convert(notebook("x = !ls\nx.sort(); y.s", "%%tpu_train\nx.append(3)\nz.n"))
    assert (
        lines_of(script, 0)[0] == "x = _tpunb_output('ls')"
    )  # IPython's sort leaves the list as it is
    script = convert(notebook("x = !ls\ny.s", "%%tpu_train\nx.append(3)\nz.n"))
    assert lines_of(script, 0)[0] == f"x = {PLAIN}"
    assert "_TpunbLines" not in script.text


@pytest.mark.usefixtures("starts_processes")
def test_only_names_whose_attributes_are_read(tmp_path: Path) -> None:
    source = "é = 1; x = 2\nx = !echo 'é {é}' \\\n  b\ny = !ls\nprint(type(y).__name__)"
    script = convert(
        notebook(
            source,
            "%%tpu_train\nimport pickle\nprint(x.s, x.fields(0, 2))\n"
            "z = pickle.loads(pickle.dumps(x))\nprint(type(z).__name__, z)",
        )
    )
    assert lines_of(script, 0)[1].startswith("x = _tpunb_output(")
    assert run(script, tmp_path).stdout == "list\né 1 b ['é b']\nlist ['é 1 b']\n"


@pytest.mark.usefixtures("starts_processes")
def test_in_a_notebook_that_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.ipy").write_text("x = !echo a\n", encoding="utf-8")
    script = convert(notebook("%run other.ipy", "%%tpu_train\nprint(x.n)"))
    assert run(script, tmp_path).stdout == "a\n"
