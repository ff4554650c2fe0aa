"""What the kernel imports, ranks import: relative entries of `sys.path`, other folders, links."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.kernel import Kernel, Ran, kernel

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
