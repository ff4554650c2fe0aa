"""What an exported script needs of the machine that it was made on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook.convert.notebooks import notebook
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.models import Export, Need


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    for name in ("data/train", "src", "package", "plain", "torch"):
        (work / name).mkdir(parents=True)
    for name in (
        *("data.csv", "data/train/a.png", "model.pt", "requirements.txt", "tool.py", "helper.py"),
        *(
            "src/inner.py",
            "package/__init__.py",
            "plain/module.py",
            "fetched.py",
            "torch/notes.txt",
        ),
    ):
        (work / name).write_text("", encoding="utf-8")
    (tmp_path / "above.txt").write_text("")
    monkeypatch.chdir(work)
    return work


def needs(*sources: str, export: Export = Export.WITH_SETUP) -> list[tuple[Need, str]]:
    script = convert(notebook(*sources, train=None), export=export)
    return [(each.need, each.name) for each in script.requirements]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import helper", "helper"),
        ("def f():\n    from helper import x", "helper"),
        ("import package.deep", "package.deep"),
        ("from plain.module import x", "plain.module"),
        ("import sys\nsys.path.append('src')\nimport inner", "inner"),
        ("import sys\nsys.path.insert(0, './src')\nimport inner", "inner"),
    ],
)
def test_local_modules(folder: Path, source: str, name: str) -> None:
    assert needs(source) == [(Need.MODULE, name)]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("open('data.csv')", "data.csv"),
        ("import pandas as pd\npd.read_csv('data.csv')", "data.csv"),
        (
            "import pandas as pd\nPATH = 'data.csv'\npd.read_csv(filepath_or_buffer=PATH)",
            "data.csv",
        ),
        ("from pathlib import Path\n(Path('data') / 'train').glob('*')", "data/train"),
        ("import os\nos.listdir(os.path.join('data', 'train'))", "data/train"),
        ("x = ImageFolder('data/train')", "data/train"),
        ("open('../above.txt').read()", "../above.txt"),
        ("import torch\nm = torch.load('model.pt')", "model.pt"),
        ("!pip install -r requirements.txt", "requirements.txt"),
        ("!python tool.py --n 3", "tool.py"),
        ("%run tool.py", "tool.py"),
    ],
)
def test_files_that_are_read(folder: Path, source: str, name: str) -> None:
    assert needs(source) == [(Need.FILE, name)]


@pytest.mark.parametrize(
    "source",
    [
        "import os, json, torch, tpunb, not_there",
        "from . import helper",
        "open('data.csv', 'w')",
        "open('not_there.csv')",
        "open('/proc/meminfo')",
        "import torch\ntorch.save({}, 'model.pt')\ntorch.load('model.pt')",
        "from pathlib import Path\nPath('data.csv').write_text('x')\nopen('data.csv')",
        "!wget https://example.org/data.csv\nopen('data.csv')",
        "!git clone https://example.org/helper\nimport helper",
        "%%writefile helper.py\nx = 1",
        "MNIST('data/train', download=True)",
        "%load_ext autoreload\n%load_ext tensorboard\n%matplotlib inline",
        "print('data.csv')",
    ],
)
def test_what_is_not_needed(folder: Path, source: str) -> None:
    assert needs(source) == []


def test_what_a_cell_writes_is_there_for_later_ones(folder: Path) -> None:
    cells = ("%%writefile helper.py\nx = 1", "import helper")
    assert needs(*cells) == []
    assert needs(*cells, export=Export.WITHOUT_SETUP) == [(Need.MODULE, "helper")]


def test_magics_that_are_not_known(folder: Path) -> None:
    found = needs("%load_ext dotenv\n%dotenv", "%%cython\ndef f(): pass")
    assert found == [
        (Need.MAGIC, "%load_ext dotenv"),
        (Need.MAGIC, "%dotenv"),
        (Need.MAGIC, "%%cython"),
    ]


def test_each_is_named_once_and_at_the_head_of_the_script(folder: Path) -> None:
    cells = ("import helper\nopen('data.csv')", "import helper")
    script = convert(notebook(*cells, train=None), export=Export.WITH_SETUP)
    lines = script.text.split("\n")
    at = lines.index("# What it needs but does not contain:")
    assert lines[at + 1 : at + 4] == [
        "# - cell [1], line 1: imports helper, a file of this machine: copy it along",
        "# - cell [1], line 2: reads data.csv, a file of this machine: copy it along",
        "#",
    ]
    assert needs(*cells) == [(Need.MODULE, "helper"), (Need.FILE, "data.csv")]
    assert "What it needs" not in convert(notebook(*cells, train=None)).text
