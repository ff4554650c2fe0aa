"""Ranks import and read what the kernel does: relative entries of `sys.path`, `%cd`, links."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.kernel import Kernel, Ran, kernel
from tpunb.runs import directory

MODULES = "above inner zipped sited variable spaced.one spaced.two benchmarks.mine".split()
SETUP = "%load_ext tpunb\n%tpu_setup --cores 2 --backend torch"
SHOW = "print([(name, importlib.import_module(name).VALUE) for name in MODULES])"


def write(folder: Path, **modules: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in modules.items():
        (folder / f"{name}.py").write_text(f"VALUE = {value!r}\n")


def write_zip(file: Path, value: str) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("zipped.py", f"VALUE = {value!r}\n")


@pytest.fixture
def nb(starts_processes: None, tmp_path: Path) -> Iterator[Kernel]:
    """A notebook in a folder of a project, which is reached through a link."""
    project, book = tmp_path / "project", tmp_path / "project" / "books"
    write(project, above="project")
    write(project / "spaced", two="project")
    write(book / "src", inner="src", queue="no library's", code="no library's")
    write(book / "src" / "spaced", one="src")
    write(book / "deps" / "more", sited="deps")
    (book / "deps" / "more.pth").write_text("more\n")
    write(book / "env", variable="PYTHONPATH")
    write(book / "benchmarks", mine="books", __init__="")  # there is one beside tpunb, too
    write_zip(book / "lib.zip", "zip")
    (tmp_path / "link").symlink_to(book)
    with kernel(tmp_path / "link", PYTHONPATH="env") as made:
        yield made


def of_both(ran: Ran, line: str) -> bool:
    """Whether both ranks have written a line."""
    lines = ran.good().stdout.splitlines()
    return f"[0-1] {line}" in lines or {f"[0] {line}", f"[1] {line}"} <= {*lines}


def test_entries_relative_to_the_kernels_folder_lead_ranks_to_the_same_modules(nb: Kernel) -> None:
    nb.run(
        "import importlib, os, site, sys\n"
        "sys.path.insert(0, 'src')\n"
        "sys.path += ['..', 'lib.zip', 'later']\n"
        "site.addsitedir('deps')\n"
        f"MODULES = {MODULES!r}",
        "path",
    ).good()
    nb.run(SETUP, "load").good()
    here = nb.run(SHOW).good().stdout.strip()
    ran = nb.run(f"%%tpu_train\nimport queue\n{SHOW}\nprint(queue.Queue.__name__)", "train")
    assert of_both(ran, here)
    write(nb.folder / "later", late="first")
    nb.run("importlib.invalidate_caches()\nimport late", "late").good()
    write_zip(nb.folder / "lib.zip", "another zip")
    ran = nb.run("%%tpu_train\nimport zipped\nprint(late.VALUE, zipped.VALUE)", "below")
    assert of_both(ran, "first another zip")


def test_modules_that_were_found_before_the_folder_changed_are_found_in_a_run(nb: Kernel) -> None:
    write(nb.folder / "repo" / "model", block="repo")
    (nb.folder / "repo" / "data").mkdir()
    (nb.folder / "repo" / "data" / "spawned.py").write_text("def work(): pass\n")
    nb.run(SETUP, "load").good()
    nb.run(
        "import importlib.util, os, sys\nsys.path.append('src')\n"
        "assert importlib.util.find_spec('inner')",
        "inner",
    ).good()
    nb.run("%cd -q repo", "cd").good()
    nb.run("import model.block", "repo").good()
    nb.run("%cd -q ../repo/data", "up").good()
    train = (
        "%%tpu_train\n"
        "import inner, multiprocessing, spawned\n"
        "if __name__ == '__main__':\n"
        "    print(inner.VALUE, model.block.VALUE, os.path.basename(os.getcwd()))\n"
        "    child = multiprocessing.get_context('spawn').Process(target=spawned.work)\n"
        "    child.start(); child.join(); print('ended', child.exitcode)"
    )
    ran = nb.run(train, "train")
    assert of_both(ran, "src repo data")
    assert of_both(ran, "ended 0")
    # The same entry leads elsewhere from now on: what was kept is out of date.
    write(nb.folder / "repo" / "data" / "src", inner="src of data")
    nb.run("importlib.invalidate_caches()\nimport inner\nassert 'data' in inner.VALUE", "in").good()
    assert of_both(nb.run(train, "below"), "src of data repo data")


def test_each_cell_runs_in_the_folder_in_which_it_ran(nb: Kernel) -> None:
    for name in ("", "a", "b", "c"):
        (nb.folder / name).mkdir(exist_ok=True)
        (nb.folder / name / "here.txt").write_text(name or "top")
    read = "open('here.txt').read()"
    nb.run(f"import os\none = {read}", "one").good()
    nb.run(f"%cd -q a\ntwo = {read}", "two").good()
    nb.run(SETUP, "load").good()
    nb.run(f"os.chdir('../b')\nthree = {read}", "three").good()
    nb.run(f"def child():\n    print('child', {read})\nfour = {read}", "four").good()
    nb.run("%cd -q ../c", "c").good()
    nb.run(f"five = {read} if os.path.exists('here.txt') else 'no file'", "five").good()
    nb.run("%cd -q ..", "up").good()
    train = (
        "%%tpu_train\n"
        "import multiprocessing\n"
        f"print(one, two, three, four, five, {read})\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start(); process.join()"
    )
    ran = nb.run(train, "train")
    assert of_both(ran, "top a b b c top")
    assert of_both(ran, "child top")
    # Another folder of the train cell is no reason to run the other cells again.
    nb.run("import tpunb\ndef show(): print(one, two, three, four, five, " + read + ")", "f").good()
    ran = nb.run("for name in ('a', '../b'):\n    os.chdir(name)\n    tpunb.launch(show)", "loop")
    assert of_both(ran, "top a b b c a")
    assert of_both(ran, "top a b b c b")
    last = directory.list_runs(nb.folder / "a" / "runs")[-1]
    assert "prelude: 8 of 8 cells reused" in last.events.read_text()
    (nb.folder / "c" / "here.txt").unlink()
    (nb.folder / "c").rmdir()
    nb.run("try:\n    os.chdir('../b')\nfinally:\n    pass", "three").good()
    ran = nb.run(train, "train")
    assert "runs in another folder than in the kernel: No such file or directory: " in ran.stdout
