"""The script as a whole: its layout, its blocks, its header, and who can read it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import warnings
from pathlib import Path

import jupytext
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.notebook.convert.notebooks import lines_of, notebook, run
from tests.support import examples
from tpunb.errors import ConversionError
from tpunb.notebook.convert import header
from tpunb.notebook.convert.convert import convert, exporter, warm_up
from tpunb.notebook.models import (
    Cell,
    EarlierRun,
    EarlierValues,
    Export,
    Omission,
    Script,
    Snapshot,
)
from tpunb.notebook.scopes import bound_names

RAN = EarlierValues((EarlierRun("/runs/one", ("w",), "r"), EarlierRun("/runs/two", ("w",))))

WHOLE = notebook(
    "import os\n%matplotlib inline\nx = 1",
    "markdown: # Title\n\n%% text",
    "from __future__ import annotations\n%pip install a\n",
    "# tpu: skip\ny = 2",
    "raw: raw",
    "%%tpu_train --cores {cores}\nprint(x)\n\nprint(os.sep)\n",
    "later = 1\n!ls",
    "markdown: below",
    train=5,
)


def test_layout() -> None:
    script = convert(WHOLE)
    header = next(block for block in script.blocks if block.role == "header")
    assert script.text.split("\n")[header.last :] == [
        "",
        "# %% cell 1",
        "import os",
        "# left out (of use in a notebook only): %matplotlib inline",
        "x = 1",
        "",
        "# %% [markdown]",
        "# # Title",
        "#",
        "# | %% text",
        "",
        "# %% cell 2",
        "# from __future__ import annotations",
        "# left out (the run uses the packages that are installed now): %pip install a",
        "",
        "",
        "# %% [markdown]",
        "# cell [3] is left out, it begins with '# tpu: skip': # tpu: skip",
        "",
        "# %% [raw]",
        "# raw",
        "",
        "# %% cell 4, on every core",
        "# magic: %%tpu_train --cores {cores}",
        "print(x)",
        "",
        "print(os.sep)",
        "",
        "",
        "",
    ]


def test_blocks_lead_back_to_cells() -> None:
    script = convert(WHOLE)
    assert [(block.role, block.cell, block.number) for block in script.blocks] == [
        ("header", None, None),
        ("prelude", 0, 1),
        ("prelude", 2, 2),
        ("train", 5, 4),
    ]
    last = script.blocks[-1]
    assert script.source(last) == "\n".join(lines_of(script, 5)) + "\n"
    line = script.text.split("\n").index("print(os.sep)") + 1
    assert script.locate(line) == (last, 4)
    assert script.locate(1) is None


def test_omissions_are_in_the_order_of_the_notebook() -> None:
    assert convert(WHOLE).omissions == (
        Omission(1, 2, "%matplotlib inline", "of use in a notebook only"),
        Omission(2, 2, "%pip install a", "the run uses the packages that are installed now"),
        Omission(3, 1, "# tpu: skip", "it begins with '# tpu: skip'"),
        Omission(5, 1, "later = 1", "it is below the train cell"),
    )


def test_tags_leave_out_and_are_kept() -> None:
    cells = (
        Cell(0, "code", "x = (", 1, None, ("tpu-skip",)),
        Cell(1, "code", "x = 1", 2, None, ("parameters", 'a"b\nc')),
        Cell(2, "code", "%%tpu_train\n", 3, None, ("tpu-skip",)),
    )
    script = convert(Snapshot(cells, 2, None, "a test"))
    assert [omission.reason for omission in script.omissions] == ["it is tagged tpu-skip"]
    assert '# %% cell 2 tags=["parameters", "a\'b c"]' in script.text.split("\n")
    assert script.blocks[-1].role == "train"


def test_the_numbers_of_cells_that_never_ran_are_their_positions() -> None:
    cells = (
        Cell(0, "markdown", "text"),
        Cell(1, "code", "x = 1"),
        Cell(2, "code", "y = 1", 7),
        Cell(3, "code", "z = 1"),
    )
    script = convert(Snapshot(cells, None, None, "a test"))
    assert [block.number for block in script.blocks] == [None, 1, 7, 3]


@pytest.mark.usefixtures("starts_processes")
def test_without_a_train_cell_everything_is_prelude(tmp_path: Path) -> None:
    script = convert(notebook("x = 1", "print(x)", train=None))
    assert [block.role for block in script.blocks] == ["header", "prelude", "prelude"]
    assert run(script, tmp_path).stdout == "1\n"


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("train", ["", "\n", "%%tpu_train", "%%tpu_train --cores 2\n\n# nothing\n"])
def test_an_empty_train_cell(train: str, tmp_path: Path) -> None:
    script = convert(notebook("print(1)", train))
    assert run(script, tmp_path).stdout == "1\n"
    assert script.blocks[-1].role == "train"
    assert len(lines_of(script, 1)) == len(train.split("\n"))


@pytest.mark.usefixtures("starts_processes")
def test_a_train_cell_that_is_chosen_needs_no_magic(tmp_path: Path) -> None:
    script = convert(notebook("x = 1", "%%time\nprint(x)", "%%tpu_train\nnope", train=1))
    assert run(script, tmp_path).stdout == "1\n"
    assert lines_of(script, 1) == ["# magic: %%time", "print(x)"]


@pytest.mark.usefixtures("starts_processes")
def test_the_header_leaves_nothing_behind(tmp_path: Path) -> None:
    source = "print([name for name in globals() if not name.startswith('__')])"
    assert run(convert(notebook(source, train=None)), tmp_path).stdout == "[]\n"


EVERYTHING = (
    "import asyncio, tpunb\nmodule = __name__",
    "files = !ls\nnames = files.grep('a')\n%pip install x\n%cd there\n%env A_TOKEN=abc",
    "%%bash --out listing\nls",
    "%%writefile a.txt\nx",
    "%timeit y = 1\n%run other.ipynb\n%run other.py\n%run -m other",
    "async def f(): ...\nawait f()\ntask = asyncio.create_task(f())",
    "display(get_ipython())",
    "def g(): ...\nresult = tpunb.launch(g)",
    "%%tpu_train --returns w --out r\nw = 1\ntpunb.log(w=w)\ntpunb.save(w, 1)\ntpunb.load()",
    "x = %tpu_attach somewhere --out there",
    "%%tpu_train\nprint(w)",
)
"""Cells for which a script needs all that tpunb may add to it."""


@pytest.mark.parametrize("export", [None, *Export])
@pytest.mark.parametrize("got", [None, {8: RAN, 9: RAN}])
def test_no_name_that_a_script_adds_can_be_one_of_the_notebooks(
    export: Export | None,
    got: dict[int, EarlierValues] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.ipynb").write_text(
        '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}'
    )
    (tmp_path / "other.py").touch()
    script = convert(notebook(*EVERYTHING), got, left=lambda name: "1", export=export)
    theirs = {*"asyncio tpunb module files names listing y f task g result w r x there".split()}
    ours = bound_names(ast.parse(script.text)) - theirs - header.BUILTINS.keys()
    assert len(ours) > 5
    others = [name for name in ours if not name.lower().startswith("_tpunb")]
    # Modules, which a notebook imports under the same name.
    assert set(others) <= {*"ast fcntl hashlib os shlex signal site subprocess sys".split()}


def test_the_header_says_what_it_is() -> None:
    text = convert(notebook("x = 1", train=None, path="/a/my\nnotebook.ipynb")).text
    assert "Made by tpunb" in text
    assert "from my notebook.ipynb" in text
    assert "torchrun --nproc-per-node=4 script.py" in text
    assert "from a notebook:" in convert(notebook("x = 1", path=None)).text


def test_the_header_names_only_what_is_used() -> None:
    def header(*cells: str) -> str:
        script = convert(notebook(*cells, train=None))
        return script.source(script.blocks[0])

    assert "display" not in header("x = 1")
    assert "get_ipython" not in header("x = 'get_ipython()'")
    assert "import display" in header("display(1)")
    assert "def get_ipython" in header("def f():\n    return get_ipython()")
    assert "__future__" not in header("x = 1")
    line = "from __future__ import annotations, division\n"
    assert line in header(
        "from __future__ import division, annotations", "x", "from __future__ import division"
    )


@pytest.mark.usefixtures("starts_processes")
def test_display_without_ipython(tmp_path: Path) -> None:
    script = convert(notebook("import sys", "display([1, 2])", train=None))
    text = f"import sys; sys.modules['IPython'] = None\n{script.text}"
    assert run(Script(text, ()), tmp_path).stdout == "[1, 2]\n"


@pytest.mark.usefixtures("starts_processes")
def test_with_tpunb_installed_the_script_is_prepared(tmp_path: Path) -> None:
    """`standalone.prepare` is called, once, and its names do not stay."""
    script = convert(notebook("print(sorted(n for n in globals() if n[0] != '_'))", train=None))
    package = tmp_path / "site" / "tpunb" / "worker"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "standalone.py").write_text("def prepare(): print('prepared')", encoding="utf-8")
    path = tmp_path / "script.py"
    path.write_text(script.text, encoding="utf-8")
    code = "import runpy, sys; sys.path.insert(0, sys.argv[1]); runpy.run_path(sys.argv[2])"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(tmp_path / "site"), str(path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.stdout, done.stderr) == ("prepared\n[]\n", "")


def test_jupytext_reads_it_as_the_notebook_it_was() -> None:
    nb = jupytext.reads(convert(WHOLE).text, fmt="py:percent")
    cells = [(cell.cell_type, cell.source.split("\n")[0]) for cell in nb.cells]
    assert cells[2:] == [
        ("code", "import os"),
        ("markdown", "# Title"),
        ("code", "# from __future__ import annotations"),
        ("markdown", "cell [3] is left out, it begins with '# tpu: skip': # tpu: skip"),
        ("raw", "raw"),
        ("code", "# magic: %%tpu_train --cores {cores}"),
    ]
    assert [cell[0] for cell in cells[:2]] == ["markdown", "code"]
    tagged = jupytext.reads(
        convert(Snapshot((Cell(0, "code", "x", 1, None, ("a", "b")),), None, None, "")).text,
        fmt="py:percent",
    )
    assert tagged.cells[-1].metadata["tags"] == ["a", "b"]


CLEAN = [
    "from __future__ import annotations\n\nimport asyncio\nimport math",
    "import os\n%matplotlib inline\nx = !ls\nv = %env HOME",
    "if display:\n    !ls\n    get_ipython()\nfor i in [1]:\n    %cd x\n!ls",
    "%%time\n\ndef f(n):\n    return math.sqrt(n)",
    "display(f(2), os.sep, x, v, i)\nget_ipython().system('ls')",
    "import sys\n\nfrom google.colab import drive\n\ndrive.mount('/d')\nsys.path.append('/d')",
    "await asyncio.sleep(0)",
]
"""Cells in which ruff finds nothing where it is given the notebook."""
DIRTY = ["import os\nx = 1;\n!ls\nprint(y, f'a')", "%time a = l = 1\nif a == None: b = 1"]


@pytest.mark.usefixtures("starts_processes")
def test_ruff_finds_nothing_that_we_wrote(tmp_path: Path) -> None:
    assert _ruff(convert(notebook(*CLEAN, "%%tpu_train\nprint(1)")), tmp_path) == []


@pytest.mark.usefixtures("starts_processes")
def test_what_ruff_finds_is_in_lines_of_the_notebook(tmp_path: Path) -> None:
    script = convert(notebook(CLEAN[0], *DIRTY, "%%tpu_train\nimport json\n"))
    found = [script.locate(line) for line in _ruff(script, tmp_path)]
    assert len(found) >= 4
    assert None not in found


def _ruff(script: Script, folder: Path) -> list[int]:
    """The lines in which ruff finds something with its default rules.

    Not F811: header and notebook may import the same modules.
    """
    path = folder / "script.py"
    path.write_text(script.text, encoding="utf-8")
    ruff = Path(sys.executable).with_name("ruff")
    done = subprocess.run(
        [ruff, "check", "--isolated", "--no-cache", "--ignore=F811", "--output-format=json", path],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return [finding["location"]["row"] for finding in json.loads(done.stdout)]


@pytest.mark.usefixtures("starts_processes")
def test_jupytexts_tags_say_where_a_cell_is_active(tmp_path: Path) -> None:
    cells = (
        Cell(0, "code", "print('notebook')", 1, None, ("active-ipynb",)),
        Cell(1, "raw", "%time print('script')", None, None, ("active-py",)),
        Cell(2, "code", "%%tpu_train\nprint('end')", 2),
    )
    script = convert(Snapshot(cells, 2, None, "a test"))
    assert run(script, tmp_path).stdout == "script\nend\n"
    assert [omission.reason for omission in script.omissions] == ["it is tagged active-ipynb"]


def test_one_exporter_is_made_and_kept() -> None:
    warm_up()
    made = exporter()
    convert(WHOLE)
    assert exporter() is made


@pytest.mark.usefixtures("starts_processes")
def test_importing_it_does_not_import_nbconvert() -> None:
    code = (
        "import sys, tpunb.notebook.convert.convert, tpunb.notebook.convert.fork_safety;"
        "import tpunb.notebook.capture.capture;"
        "print([name for name in ('nbconvert', 'nbformat', 'IPython', 'torch', 'pandas')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@settings(max_examples=examples(300), deadline=None)
@example("''()")
@given(
    st.text(alphabet=st.characters() | st.sampled_from("%!?\n\\ ='\"#()[]:,;/{}$x"), max_size=60)
)
def test_any_text_becomes_a_script_or_is_refused(source: str) -> None:
    refused = None
    try:
        script = convert(notebook("x = 1", f"%%tpu_train\n{source}"))
    except ConversionError as error:
        refused = error
    if refused is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the compiler minds of ''() and the like
            compile(script.text, "script.py", "exec", dont_inherit=True)
        made = source.replace("\r\n", "\n").replace("\r", "\n")
        assert len(lines_of(script, 1)) == len(made.split("\n")) + 1
    else:
        assert refused.cell == 2
        assert str(refused).startswith("cell [2]")
