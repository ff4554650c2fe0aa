"""The store of rehearsal ranks: the same results as torch's, and for all ranks the same."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

pytest.importorskip("torch")

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tpunb.backends.rehearsal.board import Board

LIMIT = timedelta(seconds=30)


@pytest.fixture
def file() -> Iterator[int]:
    number = os.memfd_create("board")
    yield number
    os.close(number)


def seen(store: Store) -> list[object]:
    """The result of each operation of a store."""
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


def test_board_behaves_like_the_store_of_torch(file: int) -> None:
    theirs = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = Board(file, LIMIT)
    assert seen(PrefixStore("own", board)) == seen(PrefixStore("own", theirs))
    late = Board(file, LIMIT)
    assert late.get("own/new") == b"three"
    assert late.num_keys() == board.num_keys()


@pytest.mark.usefixtures("starts_processes")
def test_board_with_concurrent_writers_is_consistent(file: int) -> None:
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
                board.set(f"last-{number}", f"{step}" + big)
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
        assert boards[1].get(f"last-{number}") == f"99{big}".encode()


def test_board_frees_overwritten_values(file: int) -> None:
    board, other, absent = (Board(file, LIMIT) for _ in range(3))
    board.set("kept", "value")
    board.set("deleted", "value")
    board.delete_key("deleted")
    for number in range(300):
        board.set("wait/0", f"{number}" + "x" * 1_000_000)
        other.set("wait/1", f"{number}" + "y" * 1_000_000)
        assert board.check(["kept"])
        assert not board.check(["deleted"])
    assert os.fstat(file).st_blocks * 512 < 30_000_000  # of 600 MB
    for reader in (board, other, absent, Board(file, LIMIT)):
        assert reader.get("wait/0") == b"299" + b"x" * 1_000_000
        assert reader.get("wait/1") == b"299" + b"y" * 1_000_000
        assert reader.get("kept") == b"value"
        assert reader.num_keys() == 3


def test_board_reader_during_cleanup_misses_nothing(file: int) -> None:
    board, ends = Board(file, LIMIT), threading.Event()
    seen: list[list[int]] = [[], []]

    def follow(index: int) -> None:
        reader = Board(file, LIMIT)
        while not ends.is_set():
            number = reader.add("number", 0) if index else int(reader.get("number"))
            assert reader.check(["fixed"])
            seen[index].append(number)

    board.set("fixed", "x" * 100_000)
    board.set("number", "0")
    threads = [threading.Thread(target=follow, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for number in range(1, 2000):
        board.set("number", f"{number}")
        board.set("filler", f"{number}" + "x" * 20_000)
    ends.set()
    for thread in threads:
        thread.join()
    assert board._generation > 10  # it did clean up meanwhile
    for numbers in seen:
        assert numbers == sorted(numbers)
        assert len(numbers) > 10


def test_board_that_is_full_raises_and_stays_readable(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpunb.backends.rehearsal.board.ROOM", 1 << 20)
    board = Board(file, LIMIT)
    board.set("key", "value")
    with pytest.raises(OSError, match="stored more than 1 MB"):
        board.set("big", "x" * (1 << 20))
    board.set("small", "other")
    assert (board.get("key"), board.get("small")) == (b"value", b"other")


def test_board_get_of_a_missing_key_times_out(file: int) -> None:
    with pytest.raises(TimeoutError, match="key-of-nobody"):
        Board(file, timedelta(milliseconds=10)).get("key-of-nobody")
