"""More of tests/scenarios/test_magics.py, which takes longer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.drivers.kernel import Kernel, kernel, until
from tests.scenarios.test_magics import at_work, bare, mark, nb, train
from tpunb.kernel.options import PARSERS


def test_two_notebooks_train_at_once(nb: Kernel, bare: Kernel) -> None:
    """A run in one kernel begins and ends in the middle of a run in another."""
    waiting = (
        f"{mark('both')}\nwhile not os.path.exists('go on'):\n    time.sleep(0.05)\nprint('on')"
    )
    ran = nb.send(f"%%tpu_train\n{waiting}", "train")
    at_work(nb, "both")
    bare.run("import os").good()
    other = bare.run("%%tpu_train --cores 2\nprint('other', os.environ['RANK'])").good()
    assert {"other 0", "other 1"} == set(re.findall(r"other \d", other.stdout))
    assert bare.working() == []
    assert len(nb.working()) == 4  # the runner and three ranks
    (nb.folder / "go on").touch()
    nb.wait(ran).good()
    assert "on\n" in ran.stdout
    assert nb.working() == []


def test_debug_cell_names_stay_in_the_kernel_and_out_of_runs(bare: Kernel) -> None:
    bare.run("%%tpu_debug\nonly_here = 4").good()
    assert bare.value("only_here") == 4
    ran = bare.run("%%tpu_train --cores 1\nprint('only_here' in globals())").good()
    assert "[0] False" in ran.stdout
    assert bare.value("'RANK' in __import__('os').environ") is False


def test_debug_cell_with_magics_and_shell_lines(bare: Kernel) -> None:
    ran = bare.run("%%tpu_debug\nout = !echo from the shell\n%time n = 3\n(out[0], n)").good()
    assert ran.shown == "('from the shell', 3)"


@pytest.mark.usefixtures("starts_processes")
def test_extension_reload_and_unload(tmp_path: Path) -> None:
    with kernel(tmp_path, file=None) as nb:
        nb.run("%load_ext tpunb\n%tpu_setup").good()
        before = until(
            lambda: len(found := nb.processes()) == 2 and found, "supervisor and fork server"
        )
        assert "already loaded" in nb.run("%load_ext tpunb").good().stdout
        assert nb.run("%load_ext tpunb.kernel.magics").good().screen() == ""
        assert nb.processes() == before
        assert nb.run("%reload_ext tpunb").good().screen() == ""
        assert nb.processes() == []
        nb.run("%tpu_setup").good()
        until(lambda: len(nb.processes()) == 2, "a new supervisor and fork server")
        assert nb.run("%unload_ext tpunb").good().screen() == ""
        assert nb.processes() == []
        for magic in (parser.prog for parser in PARSERS):
            cell = "\npass" if magic.startswith("%%") else ""
            assert "not found" in nb.run(f"{magic}{cell}").stderr
        nb.run("%load_ext tpunb").good()
        assert "free in" in nb.run("%tpu_setup --no-warm").good().status
        assert nb.processes() == []
