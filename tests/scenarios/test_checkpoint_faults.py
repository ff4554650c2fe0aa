"""Checkpoints under faults: files cut off or changed, full disks, kills, readers beside writers."""

from __future__ import annotations

import contextlib
import copyreg
import errno
import gc
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
from typing import IO

import pytest
import torch

from tests.training.checkpoint.test_api import files, loaded
from tpunb.errors import CheckpointError
from tpunb.training.checkpoint import api, store
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


@pytest.mark.parametrize("position", [0, 500, -200, -1])
@pytest.mark.parametrize("cut_off", [True, False])
def test_checkpoint_that_is_cut_off_or_changed_is_not_loaded(
    position: int, cut_off: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    save("old", 1)
    save({"x": torch.arange(5)}, 2)
    newest = files()[-1]
    content = bytearray(newest.read_bytes())
    assert loaded().step == 2
    if cut_off:
        del content[position:]
    else:
        content[position] ^= 1
    newest.write_bytes(content)
    assert loaded().state == "old"
    said = capsys.readouterr().err
    assert said.startswith("tpunb.load: step 2 is cut off or changed (/")
    assert said.endswith("using step 1\n")
    assert said.count("\n") == 1
    files()[0].write_bytes(b"")
    assert load() is None
    assert "no older one in" in capsys.readouterr().err


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
        assert re.search(r"cannot write to /.*/checkpoints: File too large", text)
        assert "its tensors take 4.0 MB, " in text
        assert "Step 3 is not saved; earlier checkpoints are intact" in text
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
def test_save_removes_temporary_files_of_dead_processes() -> None:
    def dies(file: IO[bytes]) -> str:
        os._exit(0)

    with child(lambda: store.LocalStore("checkpoints").write(dies)) as pid:
        assert code_of(pid) == 0
    (left,) = files()

    def in_the_middle_of_another(file: IO[bytes]) -> str:
        """As in a save of another thread or rank."""
        for path in files():
            os.utime(path, (0, 0))
        save("x", 1)
        assert not left.exists()
        return "own"

    store.LocalStore("checkpoints").write(in_the_middle_of_another)
    assert [path.name[:6] for path in files()] == ["000001", "own"]


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
