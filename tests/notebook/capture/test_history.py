"""The executions of a shell, before and after the hook."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tpunb.notebook.capture.history import Execution, History


def run(shell: InteractiveShell, source: str, id: str | None = None) -> None:
    shell.run_cell(source, store_history=True, cell_id=id)


def test_every_execution_with_its_id_and_the_number_that_is_shown(shell: InteractiveShell) -> None:
    history = History(shell)
    run(shell, "a = 1", "x")
    run(shell, "%%time\nb = 2")
    run(shell, "a = 1\n", "x")
    assert history.executions() == (
        Execution("a = 1", 1, "x"),
        Execution("%%time\nb = 2", 2),
        Execution("a = 1\n", 3, "x"),
    )


def test_the_running_cell_is_the_last_execution(shell: InteractiveShell) -> None:
    history = History(shell)
    seen = []
    shell.user_ns["look"] = lambda: seen.append(history.executions()[-1])
    run(shell, "a = 1")
    run(shell, "look()", "x")
    assert seen == [Execution("look()", 2, "x")]


def test_what_ran_before_comes_from_the_shell(shell: InteractiveShell) -> None:
    run(shell, "a = 1", "x")
    shell.user_ns.update(shell=shell, made=[], History=History)
    run(shell, "made.append(History(shell))", "y")  # as `%load_ext tpunb` does
    run(shell, "b = 2", "z")
    assert shell.user_ns["made"][0].executions() == (
        Execution("a = 1", 1),
        Execution("made.append(History(shell))", 2),
        Execution("b = 2", 3, "z"),
    )


def test_the_folder_of_each_cell_also_of_those_before(
    shell: InteractiveShell, tmp_path: Path
) -> None:
    for name in ("a b", "c", "d"):
        (tmp_path / name).mkdir()
    run(shell, "%cd -q 'a b'\n%cd none")
    run(shell, "import os\nif True:\n    %cd -q ../c")
    run(shell, "os.chdir('../d')")
    run(shell, "cd -")
    run(shell, "cd = 1")
    run(shell, "os.chdir(os.path.join('..', 'd'))")
    history = History(shell)
    run(shell, "os.chdir('..')")
    run(shell, "1")
    names = [os.path.basename(execution.cwd) for execution in history.executions()]
    top = tmp_path.name
    assert names == [top, "a b", "c", "d", "a b", "a b", "d", top]


def test_the_front_ends_own_requests_do_not_count(shell: InteractiveShell) -> None:
    history = History(shell)
    shell.run_cell("a = 1", store_history=False)
    shell.run_cell("a = 1", store_history=True, silent=True)
    run(shell, "")
    run(shell, "get_ipython().run_cell('inner = 1')")
    assert [one.source for one in history.executions()] == ["get_ipython().run_cell('inner = 1')"]


def test_how_long_each_cell_took_since_tpunb_was_loaded(shell: InteractiveShell) -> None:
    run(shell, "a = 1")
    shell.user_ns.update(shell=shell, made=[], History=History)
    run(shell, "made.append(History(shell))")
    history = shell.user_ns["made"][0]
    run(shell, "import time; time.sleep(0.05)")
    run(shell, "history = made[0]; during = history.executions()[-1].seconds")
    before, loading, waiting, running = history.executions()
    assert before.seconds is loading.seconds is shell.user_ns["during"] is None
    assert waiting.seconds >= 0.05
    assert running.seconds >= 0


@pytest.mark.parametrize("source", ["1 / 0", "this is not python", "%%nomagic\nx"])
def test_failures_are_marked(shell: InteractiveShell, source: str) -> None:
    history = History(shell)
    run(shell, "a = 1")
    run(shell, source, "x")
    run(shell, "b = 2")
    assert history.executions() == (
        Execution("a = 1", 1),
        Execution(source, 2, "x", failed=True),
        Execution("b = 2", 3),
    )


def test_close_stops_listening_and_keeps_what_was(shell: InteractiveShell) -> None:
    before = {name: list(hooks) for name, hooks in shell.events.callbacks.items()}
    history = History(shell)
    run(shell, "a = 1")
    history.close()
    run(shell, "b = 2")
    assert history.executions() == (Execution("a = 1", 1),)
    assert {name: list(hooks) for name, hooks in shell.events.callbacks.items()} == before


def test_what_the_front_end_says_of_deleted_cells(shell: InteractiveShell) -> None:
    sent: dict[str, Any] = {}
    shell.parent_header = {"metadata": sent}  # as a kernel's shell has it
    history = History(shell)
    run(shell, "a = 1", "x")
    sent["deletedCells"] = ["x", "y"]
    before = time.time()
    run(shell, "b = 2", "z")
    assert set(history.deleted()) == {"x", "y"}
    assert all(before <= when <= time.time() for when in history.deleted().values())
    sent["deletedCells"] = []
    run(shell, "a = 1", "x")  # it was put back
    assert set(history.deleted()) == {"y"}


def test_ids_as_colab_sends_and_keeps_them(shell: InteractiveShell) -> None:
    run(shell, "a = 1")
    kept = [{"code": "", "cell_id": ""}, {"code": "a = 1", "cell_id": "p"}]
    shell.history_manager._input_hist_cells = kept
    shell.parent_header = {"metadata": {"colab": {"cell_id": "q"}}}
    history = History(shell)
    run(shell, "b = 2")
    assert [one.id for one in history.executions()] == ["p", "q"]
    kept[1]["code"] = "something else"  # then it is not what is thought
    assert [one.id for one in History(shell).executions()] == [None, None]


def test_variables_that_cells_removed(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ONE", "TWO", "BACK"):
        monkeypatch.setenv(name, f"{name} was")
    history = History(shell)
    run(shell, "import os; del os.environ['ONE'], os.environ['BACK']")
    run(shell, "os.environ.pop('TWO'); os.environ['BACK'] = 'again'")
    assert history.removed_variables({1}) == {"ONE": "ONE was"}
    assert history.removed_variables({1, 2, 3}) == {"ONE": "ONE was", "TWO": "TWO was"}


@pytest.mark.usefixtures("starts_processes")
def test_variables_removed_before_tpunb_was_loaded(tmp_path: Path) -> None:
    code = """
    import os, sys
    from IPython.core.interactiveshell import InteractiveShell
    from tpunb.notebook.capture.history import History
    shell = InteractiveShell()
    shell.run_cell("import os; os.environ.pop('NAMED')", store_history=True)
    os.environ.pop("OTHER")
    print(History(shell).removed_variables({1}))
    """
    env = {**os.environ, "IPYTHONDIR": str(tmp_path), "NAMED": "a=b", "OTHER": "x"}
    command = [sys.executable, "-c", dedent(code)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert ran.stdout.endswith("{'NAMED': 'a=b'}\n")
