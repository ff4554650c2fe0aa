"""The store of rehearsal ranks: the same results as torch's, and for all ranks the same."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

pytest.importorskip("torch")

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tpunb.xla.rehearsal.board import Board

LIMIT = timedelta(seconds=30)


@pytest.fixture
def file() -> Iterator[int]:
    number = os.memfd_create("board")
    yield number
    os.close(number)


def seen(store: Store) -> list[object]:
    """What each operation of a store gives."""
    with pytest.raises((TimeoutError, RuntimeError)):
        store.wait(["never"], timedelta(milliseconds=20))
    return [
        store.check(["a"]),
        store.set("a", "one"),
        store.get("a"),
        store.check(["a"]),
        store.check(["a", "b"]),
        store.add("n", 2),
        store.add("n", -3),
        store.get("n"),
        store.compare_set("a", "other", "two"),
        store.compare_set("a", "one", "two"),
        store.compare_set("new", "", "three"),
        store.compare_set("absent", "four", "five"),
        store.get("a"),
        store.delete_key("a"),
        store.delete_key("a"),
        store.check(["a"]),
        store.wait(["new", "n"], timedelta(seconds=1)),
    ]


def test_it_does_what_torch_s_store_does(file: int) -> None:
    theirs = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = Board(file, LIMIT)
    assert seen(PrefixStore("own", board)) == seen(PrefixStore("own", theirs))
    late = Board(file, LIMIT)
    assert late.get("own/new") == b"three"
    assert late.num_keys() == board.num_keys()


def test_all_who_write_at_once_agree(file: int) -> None:
    children = []
    big = "x" * 100_000
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            board = Board(file, LIMIT)
            board.add("here", 1)
            while board.add("here", 0) < 4:
                pass
            for step in range(100):
                board.add("sum", 1)
                board.set(f"{number}-{step}", big[: step * 1000])
                board.compare_set(f"first-{step}", "", str(number))
            os._exit(0)
        children.append(pid)
    boards = [Board(file, LIMIT) for _ in range(2)]
    firsts: list[list[bytes]] = [[], []]

    def follow(index: int) -> None:
        firsts[index] = [boards[index].get(f"first-{step}") for step in range(100)]

    threads = [threading.Thread(target=follow, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    for thread in threads:
        thread.join()
    assert firsts[0] == firsts[1]
    assert boards[0].add("sum", 0) == 400
    for number in range(4):
        assert boards[1].get(f"{number}-99") == big[:99_000].encode()


def test_a_full_board_is_an_error_and_stays_readable(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpunb.xla.rehearsal.board.ROOM", 1 << 20)
    board = Board(file, LIMIT)
    board.set("key", "value")
    with pytest.raises(OSError, match="told each other more than 1 MB"):
        board.set("big", "x" * (1 << 20))
    board.set("small", "other")
    assert (board.get("key"), board.get("small")) == (b"value", b"other")


def test_a_key_that_never_comes_is_an_error_in_time(file: int) -> None:
    with pytest.raises(TimeoutError, match="key-of-nobody"):
        Board(file, timedelta(milliseconds=10)).get("key-of-nobody")
