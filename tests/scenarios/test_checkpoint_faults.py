"""Checkpoints under faults: files cut off or changed, full disks, kills, readers beside writers."""

from __future__ import annotations

import contextlib
import copyreg
import errno
import gc
import io
import os
import random
import re
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

from tests.training.checkpoint.test_api import files, loaded
from tpunb.errors import CheckpointError
from tpunb.training.checkpoint import api, format, store
from tpunb.training.checkpoint.api import load, save

pytestmark = pytest.mark.usefixtures("outside_run")


@contextlib.contextmanager
def child(work: Callable[[], object]) -> Iterator[int]:
    """A forked process; it is killed if it is still there at the end."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 on: torch's threads here are none of the child's concern.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            torch.set_num_threads(1)  # the parent's are not there any more
            work()
            code = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_truncated_checkpoint_is_not_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    save("old", 1)
    save({"x": torch.arange(5)}, 2)
    newest = files()[-1]
    content = newest.read_bytes()
    assert loaded().step == 2
    # The check itself at every byte; all of load, which takes longer, at some and at the ends.
    for length in range(len(content)):
        cut = content[:length]
        assert not format.is_whole(io.BytesIO(cut), newest.name), length
        if length % 197 == 0 or length < 3 or length > len(content) - 3:
            newest.write_bytes(cut)
            assert loaded().state == "old", length
            said = capsys.readouterr().err
            assert said.startswith("tpunb.load: step 2 is cut off or changed (/")
            assert said.endswith("using step 1\n")
            assert said.count("\n") == 1
    newest.write_bytes(content + b"\0")
    assert loaded().state == "old"
    newest.write_bytes(content)
    assert loaded().step == 2


def test_checkpoint_corruption_of_any_byte_is_detected() -> None:
    save("old", 1)
    save({"x": torch.arange(5)}, 2)
    newest = files()[-1]
    content = newest.read_bytes()
    dice = random.Random(0)
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << dice.randrange(8)
        assert not format.is_whole(io.BytesIO(changed), newest.name), position
    newest.write_bytes(changed)
    assert loaded().state == "old"


def test_load_returns_none_if_every_checkpoint_is_corrupt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    save("x", 1)
    files()[0].write_bytes(b"")
    assert load() is None
    said = capsys.readouterr().err
    assert "step 1 is cut off or changed" in said
    assert "no older one in" in said


def test_corrupt_checkpoint_does_not_count_toward_the_three_kept() -> None:
    for step in (1, 2, 3):
        save(step, step)
    broken = files()[1]
    broken.write_bytes(broken.read_bytes()[:-1])
    save(4, 4)
    assert [loaded(step=step).state for step in (1, 3, 4)] == [1, 3, 4]
    save(5, 5)
    assert len(files()) == 3


@pytest.mark.parametrize("size", [0, 1, 21, 22, 23, 100, 5000])
def test_checkpoint_writer_keeps_the_order_of_bytes(size: int, tmp_path: Path) -> None:
    data = bytes(random.Random(size).randrange(256) for _ in range(size))
    end = b"PK\x05\x06" + bytes(18)
    path = tmp_path / "file"
    with open(path, "wb") as file:
        writer = format.Writer(file, "name")
        position = 0
        for length in (1, 5, 30, 0, 22, 21, 3000, size):
            part = data[position : position + length]
            assert writer.write(part) == len(part)
            position += len(part)
        writer.write(end)
        writer.finish()
    expected = data + end[:-2] + (256).to_bytes(2, "little")
    assert path.read_bytes()[: -format.END] == expected
    with open(path, "rb") as file:
        assert format.is_whole(file, "name")
        assert not format.is_whole(file, "another")


@pytest.mark.usefixtures("starts_processes")
def test_full_disk_leaves_other_checkpoints_intact() -> None:
    save("first", 1)
    save("second", 2)

    def limited() -> None:
        # The nearest thing to a full disk that needs no rights: a write fails half way.
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        with pytest.raises(CheckpointError) as caught:
            save({"x": torch.zeros(1_000_000)}, 3)
        text = str(caught.value)
        assert re.search(r"cannot write /.*/checkpoints/000003-step-3-\w+.pt: File too", text)
        assert "its tensors take 4.0 MB, " in text
        assert "Step 3 is not saved; the checkpoints of steps 2, 1 are intact" in text
        assert isinstance(caught.value.__cause__, OSError)
        assert loaded().state == "second"
        assert len(files()) == 2  # no temporary file either
        save("small", 4)

    with child(limited) as pid:
        assert code_of(pid) == 0
    assert loaded().state == "small"


# Between the opening of a file and `with`, an interrupt leaves the closing to Python.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_interrupt_at_any_moment_of_a_save_is_not_lost() -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        # Python's own code there drops whatever one line raises: an interrupt comes after it.
        if frame is not None and frame.f_code is copyreg._slotnames.__code__:  # type: ignore[attr-defined]
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            return
        raise KeyboardInterrupt

    dice = random.Random(1)
    state = {"weights": [torch.ones(20_000) for _ in range(10)]}
    started = time.monotonic()
    save(state, 0)
    span = 3 * (time.monotonic() - started)
    before, step = signal.signal(signal.SIGALRM, interrupt), 0
    gc.disable()  # what a hook of the collector raises is dropped (hypothesis has one)
    try:
        for _ in range(60):
            reached = step
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(span / 20, span))
                for _ in range(10_000):  # an interrupt that is lost makes this end
                    save(state, step + 1)
                    step += 1
                raise AssertionError("the interrupt was lost")
            # What it reached may have become whole without having been counted.
            assert loaded().step in (step, step + 1)
            assert step >= reached
            # A save takes longer or shorter as other processes use the processors.
            span *= 1.2 if step == reached else 1 / 1.1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert step > 0
    assert not list(Path("checkpoints").glob(".*.tmp"))


@pytest.mark.usefixtures("starts_processes")
def test_interrupt_while_torch_closes_its_archive_does_not_abort() -> None:
    """torch closes it when it is let go of, when the file is closed, and aborts on an error."""

    def interrupted(self: object, *args: object) -> None:
        raise KeyboardInterrupt

    def work() -> None:
        torch.serialization._open_zipfile_writer_buffer.__exit__ = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            save({"x": torch.ones(3)}, 1)

    with child(work) as pid:
        assert code_of(pid) == 0
    assert not files()


@pytest.mark.usefixtures("starts_processes")
def test_save_after_an_interrupt_of_a_rank_completes() -> None:
    read, write = os.pipe()

    def work() -> None:
        state = {"weights": [torch.ones(50_000) for _ in range(20)]}
        step = 0
        try:
            while True:
                save(state, step)
                step += 1
                os.write(write, b".")
        except KeyboardInterrupt:
            save(state, 1_000_000)

    with child(work) as pid:
        os.read(read, 1)
        time.sleep(0.01)  # most likely in the middle of a save
        os.kill(pid, signal.SIGINT)
        assert code_of(pid) == 0
    assert loaded().step == 1_000_000
    assert not list(Path("checkpoints").glob(".*.tmp"))


@pytest.mark.usefixtures("starts_processes")
def test_save_removes_temporary_files_of_dead_processes() -> None:
    def dies() -> None:
        with store.LocalStore("checkpoints").write("x"):
            os._exit(0)

    with child(dies) as pid:
        assert code_of(pid) == 0
    (left,) = files()
    assert left.name.endswith(".tmp")
    elsewhere = left.with_name(".another-machine.1.0.tmp")
    elsewhere.touch()
    with store.LocalStore("checkpoints").write("own") as file:
        file.write(b"not a checkpoint")
        save("x", 1)  # in the middle of another save, of another thread for example
        assert not left.exists()
        assert len([path for path in files() if path.name.endswith(".tmp")]) == 2
    os.utime(elsewhere, (0, 0))
    save("y", 2)
    assert [path.name[:6] for path in files()] == ["000001", "000002", "own"]


@pytest.mark.usefixtures("starts_processes")
def test_load_during_saves_always_finds_a_complete_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A reader opens files that the writer is about to remove."""
    size = 20_000
    save({"x": torch.zeros(size)}, 0)

    def reads() -> None:
        last = -1
        while last < 60:
            found = loaded()
            assert found.step >= last
            assert (found["x"] == found.step).all()
            last = found.step
        assert "changed" not in capsys.readouterr().err

    with child(reads) as one, child(reads) as other:
        for step in range(1, 61):
            save({"x": torch.full((size,), float(step))}, step)
        assert code_of(one) == 0
        assert code_of(other) == 0


def test_save_from_several_threads_at_once() -> None:
    threads = [
        threading.Thread(target=lambda number=number: [save(number, number) for _ in range(10)])
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded().step in range(4)
    assert not [path for path in files() if path.name.endswith(".tmp")]


def test_save_continues_if_old_checkpoints_cannot_be_removed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(api, "remove_old", refuse)
    save("x", 1)
    assert "cannot remove old checkpoints" in capsys.readouterr().err
    assert loaded().step == 1
