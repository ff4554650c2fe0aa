"""Forks after a prelude has used libraries: children work, or the fork is refused with a reason."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.drivers.preludes import FORKED, REFUSED, fork_after
from tests.drivers.ranks import Ranks
from tpunb.worker import fork_safety

ROOT = Path(__file__).parent.parent.parent

OFTEN = ("torch", "pandas", "tokenizers", "cv2", "tqdm", "concurrent.futures", "torch.autograd")
"""One library of each kind; tests/long/test_ranks.py tries the others."""


@pytest.mark.parametrize("library", [name for name in FORKED if name in OFTEN])
def test_fork_after_a_library_that_survives_it(ranks: Ranks, library: str) -> None:
    check_fork(ranks, library)


@pytest.mark.parametrize("library", [name for name in REFUSED if name in OFTEN])
def test_fork_refused_after_a_library(ranks: Ranks, library: str) -> None:
    check_refusal(ranks, library)


def check_fork(ranks: Ranks, library: str) -> None:
    (parent,) = ranks.values(fork_after, 1, library, 4)
    if parent is None:
        pytest.skip(f"{library} is not installed")
    assert parent == (None, [0] * 4)


def check_refusal(ranks: Ranks, library: str) -> None:
    (parent,) = ranks.values(fork_after, 1, library, 4)
    if parent is None:
        pytest.skip(f"{library} is not installed")
    _, words = REFUSED[library]
    assert words in str(parent.problem)


@pytest.mark.parametrize(
    ("code", "is_call"),
    [
        ("e8 10 20 30 40", True),  # call rel32
        ("ff 15 10 20 30 40", True),  # call [rip+disp32]
        ("41 ff d4", True),  # call r12
        ("ff 50 18", True),  # call [rax+disp8]
        ("ff 54 24 08", True),  # call [rsp+disp8]
        ("66 0f 1f 44 00 00", False),  # the padding before a function
        ("c3 cc cc cc cc", False),
        ("ff e0", False),  # jmp rax
    ],
)
def test_return_addresses_follow_a_call_instruction(code: str, is_call: bool) -> None:
    """Pointers to functions of libnccl, in its thread-local data, were taken for its threads."""
    before = bytes.fromhex(code).rjust(8, b"\x90")
    assert (fork_safety._CALL.search(before) is not None) == is_call


def test_every_library_that_was_measured_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "forks.md").read_text(encoding="utf-8")
    assert [name for name in [*FORKED, *REFUSED] if f"| {name} |" not in page] == []


@pytest.mark.usefixtures("starts_processes")
def test_a_test_fork_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a library's fork handler waited for a lock in the child."""
    monkeypatch.setattr(fork_safety, "CHILD_WAIT", 0.1)
    assert not fork_safety.run_in_fork(lambda: time.sleep(600) is None)
    assert fork_safety.run_in_fork(lambda: True)


@pytest.mark.parametrize(
    ("variable", "count"),
    [("4", 4), ("4,2", 4), (" 3 , 1", 3), ("0", None), ("", None), (None, None), ("many", None)],
)
def test_thread_count_of_openmp_variable(variable: str | None, count: int | None) -> None:
    """'4,2' is valid: it ended every rank."""
    assert fork_safety.thread_count(variable) == count
