"""What an exported script needs of the machine that it was made on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook.convert.notebooks import notebook
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.models import Export, Need

FILES = (
    "work/data.csv work/data/train/a.png work/model.pt work/requirements.txt work/tool.py "
    "work/helper.py work/src/inner.py work/package/__init__.py work/plain/module.py "
    "work/torch/notes.txt above.txt"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FILES.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "work")


def needs(*sources: str, export: Export = Export.WITH_SETUP) -> list[tuple[Need, str]]:
    script = convert(notebook(*sources, train=None), export=export)
    return [(each.need, each.name) for each in script.requirements]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f():\n    from helper import x", "helper"),
        ("import package.deep", "package.deep"),
        ("from plain.module import x", "plain.module"),
        ("import sys\nsys.path.insert(0, './src')\nimport inner", "inner"),
    ],
)
def test_local_modules(source: str, name: str) -> None:
    assert needs(source) == [(Need.MODULE, name)]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pandas as pd\nPATH = 'data.csv'\npd.read_csv(path=PATH)", "data.csv"),
        ("from pathlib import Path\n(Path('data') / 'train').glob('*')", "data/train"),
        ("import os\nos.listdir(os.path.join('data', 'train'))", "data/train"),
        ("open('../above.txt').read()", "../above.txt"),
        ("import torch\nm = torch.load('model.pt')", "model.pt"),
        ("!pip install -r requirements.txt", "requirements.txt"),
        ("%run tool.py", "tool.py"),
    ],
)
def test_files_that_are_read(source: str, name: str) -> None:
    assert needs(source) == [(Need.FILE, name)]


@pytest.mark.parametrize(
    "source",
    [
        "import os, json, torch, tpunb, not_there",
        "from . import helper",
        "open('data.csv', 'w')",
        "open('/proc/meminfo')",
        "import torch\ntorch.save({}, 'model.pt')\ntorch.load('model.pt')",
        "!wget https://example.org/data.csv\nopen('data.csv')",
        "!git clone https://example.org/helper\nimport helper",
        "MNIST('data/train', download=True)",
        "%load_ext autoreload\n%load_ext tensorboard\n%matplotlib inline",
        "print('data.csv')",
    ],
)
def test_what_is_not_needed(source: str) -> None:
    assert needs(source) == []


def test_what_a_cell_writes_is_there_for_later_ones() -> None:
    cells = ("%%writefile helper.py\nx = 1", "import helper")
    assert needs(*cells) == []
    assert needs(*cells, export=Export.WITHOUT_SETUP) == [(Need.MODULE, "helper")]


def test_magics_that_are_not_known() -> None:
    found = needs("%load_ext dotenv\n%dotenv", "%%cython\ndef f(): pass")
    assert [name for _, name in found] == ["%load_ext dotenv", "%dotenv", "%%cython"]


def test_each_is_named_once_and_at_the_head_of_the_script() -> None:
    cells = ("import helper\nopen('data.csv')", "import helper")
    script = convert(notebook(*cells, train=None), export=Export.WITH_SETUP)
    named = [line for line in script.text.split("\n") if line.startswith("# - cell")]
    assert [line.partition(",")[0] for line in named] == ["# - cell [1]"] * 2
    assert needs(*cells) == [(Need.MODULE, "helper"), (Need.FILE, "data.csv")]
    assert "What it needs" not in convert(notebook(*cells, train=None)).text
