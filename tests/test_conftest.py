"""A test that leaves a process behind fails, whatever the process did to get away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drivers.kernel import ROOT, until
from tpunb.utils import processes

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("starts_processes")

LEAVING = """
import pytest, subprocess, sys

pytestmark = pytest.mark.usefixtures("starts_processes")

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
ORPHAN = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"

def test_child():
    subprocess.Popen(SLEEP)

def test_orphan_in_its_own_session():
    subprocess.run([sys.executable, "-c", ORPHAN, *SLEEP], check=True)

def test_child_without_the_environment():
    subprocess.Popen(SLEEP, env={})

def test_child_that_ended():
    subprocess.run([sys.executable, "-c", ""], check=True)
"""

SHARING = """
import subprocess, sys, pytest

@pytest.fixture(scope="module")
def shell(starts_processes):
    with subprocess.Popen(["sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sh:
        yield sh
        if {end}:
            sh.communicate("kill $!\\n")
        else:
            sh.kill()

def test_that_starts_a_helper_below_it(shell):
    shell.stdin.write("sleep 60 >&- & echo started\\n")
    shell.stdin.flush()
    assert shell.stdout.readline() == "started\\n"

def test_that_finds_it_there(shell):
    assert shell.poll() is None
"""


UNSAID = """
import os, subprocess, sys, pytest

@pytest.fixture(scope="module")
def ended():
    subprocess.run([sys.executable, "-c", ""], check=True)

@pytest.fixture
def ended_for_each():
    subprocess.run([sys.executable, "-c", ""], check=True)

def test_fixture(ended):
    pass

def test_fixture_for_each(ended_for_each):
    pass

def test_that_says_so(starts_processes, ended_for_each):
    pass

def test_process():
    subprocess.run([sys.executable, "-c", ""], check=True)

def test_fork():
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)

def test_none():
    pass
"""

CHANCE = """
import pytest

tries = []

@pytest.mark.usefixtures("starts_processes")
def test_with_processes():
    tries.append(1)
    assert len(tries) > 1, "busy"

def test_without():
    assert False
"""


def run(pytester: pytest.Pytester, text: str, patience: float) -> pytest.RunResult:
    conftest = Path(__file__).with_name("conftest.py").read_text()
    assert "PATIENCE = 60.0" in conftest
    pytester.makeconftest(conftest.replace("PATIENCE = 60.0", f"PATIENCE = {patience}"))
    pytester.makepyfile(text)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "ignore::ResourceWarning")


def test_left_processes_are_named_and_ended(pytester: pytest.Pytester) -> None:
    result = run(pytester, LEAVING, 1.0)
    result.assert_outcomes(passed=4, errors=3)
    named = [line.split(":")[0] for line in result.outlines if "time.sleep(60)" in line]
    pids = {int(text) for text in named if text.strip().isdigit()}
    assert len(pids) == 3
    until(lambda: not any(map(processes.find_process, pids)), "they have ended")


def test_a_shared_process_keeps_its_helpers_until_the_module_ends(
    pytester: pytest.Pytester,
) -> None:
    run(pytester, SHARING.format(end=True), 60.0).assert_outcomes(passed=2)


def test_helpers_of_a_shared_process_must_end_with_it(pytester: pytest.Pytester) -> None:
    result = run(pytester, SHARING.format(end=False), 1.0)
    result.assert_outcomes(passed=2, errors=1)
    assert "sleep 60" in "\n".join(result.outlines)


def test_a_process_that_no_fixture_announces_is_refused(pytester: pytest.Pytester) -> None:
    result = run(pytester, UNSAID, 1.0)
    result.assert_outcomes(passed=2, failed=2, errors=2)
    assert str(result.stdout).count("starts_processes`") >= 4


def test_a_second_try_is_for_processes_only_and_named_at_the_end(
    pytester: pytest.Pytester,
) -> None:
    result = run(pytester, CHANCE, 1.0)
    assert {"1 failed", "1 passed", "1 rerun"} <= set(
        result.outlines[-1].strip("= ").partition(" in ")[0].split(", ")
    )
    [line] = [line for line in result.outlines if "the second time" in line]
    assert "test_with_processes" in line
    assert "busy" in line


def test_collecting_tests_does_not_import_torch_xla() -> None:
    without = (
        "import sys, pytest; sys.modules['torch_xla'] = None; "
        "sys.exit(pytest.main(['--collect-only', '-qq', '-p', 'no:cacheprovider']))"
    )
    done = subprocess.run([sys.executable, "-c", without], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_process_check_is_active_in_this_session(request: pytest.FixtureRequest) -> None:
    assert "_no_process_left_by_test" in request.fixturenames
    assert "TPUNB_TEST" in os.environ
