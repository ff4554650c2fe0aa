"""Forks of a process that has computed in threads: which pools to end, and what forbids a fork.

Of several threads only the forking one goes on in the child, and locks that others held stay
locked. A pool of threads is no obstacle where its library starts it anew: OpenMP's after it is
paused here, others by fork handlers of their own (`POOLS`). Other threads, a backward pass, and
an XLA runtime forbid a fork; what was measured is in docs/forks.md.
"""

from __future__ import annotations

import array
import bisect
import contextlib
import ctypes
import os
import platform
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import threadpoolctl

from tpunb.utils import processes
from tpunb.xla import runtime
from tpunb.xla.runtime import EngineWatch

PATIENCE = 2.0
"""Seconds that a thread may go on after a cell, before it forbids a fork."""
_PAUSE_HARD = 2  # omp_pause_hard, OpenMP 5.0: the threads and all else end, until the next region
_TASKS = Path("/proc/self/task")
_RAYON = "TOKENIZERS_PARALLELISM"
_without_rayon = False
"""Whether a process that this one was forked from has used the threads of tokenizers."""


def fork() -> int:
    """`os.fork` after `pause_thread_pools`."""
    pause_thread_pools()
    return fork_paused()


def fork_paused() -> int:
    """`os.fork` where nothing has computed since `pause_thread_pools`, which takes 5 ms."""
    global _without_rayon
    _without_rayon = _without_rayon or _tokenizers_has_threads()
    asked = os.environ.get(_RAYON)
    pid = -1
    try:
        if _without_rayon:  # else its fork handler warns, and with "true" a child would hang
            os.environ[_RAYON] = "false"
        with warnings.catch_warnings():
            # Python 3.12 warns of any other thread, and jax, once imported, of all forks.
            warnings.simplefilter("ignore")
            pid = os.fork()
    finally:
        if pid and _without_rayon:
            del os.environ[_RAYON]
            if asked is not None:
                os.environ[_RAYON] = asked
    return pid


def run_in_fork(function: Callable[[], bool]) -> bool:
    """What a function returns in a fork, which ends with it. False if that cannot be known."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with processes.own_children():
            pid = fork()
            if pid == 0:
                code = 1
                try:
                    code = int(not function())
                finally:
                    os._exit(code)
            with contextlib.suppress(ChildProcessError):  # a thread waits for any child
                return os.waitpid(pid, 0)[1] == 0
            return False
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def pause_thread_pools() -> None:
    """End the threads of libraries that start them again when they next need them.

    Those of every loaded OpenMP library (torch has its own, and so has scikit-learn), those of
    joblib's worker processes, OpenCV's, and tqdm's, which watches its bars. Call it in the thread
    that forks: an OpenMP pool belongs to the thread that started it.
    """
    if len(os.listdir(_TASKS)) == 1:
        return
    for library in _libraries("openmp"):
        pause = getattr(ctypes.CDLL(library.filepath), "omp_pause_resource_all", None)
        if pause is not None:  # libgomp has it since GCC 9, libomp since LLVM 9
            pause(_PAUSE_HARD)
    if callable(set_count := _function("cv2", "setNumThreads")):
        count = sys.modules["cv2"].getNumThreads()
        set_count(1)
        set_count(count)
    threads = threading.enumerate()
    if any(thread.name == "ExecutorManagerThread" for thread in threads):
        for loky in ("loky", "joblib.externals.loky"):
            if callable(executor := _function(loky, "get_reusable_executor")):
                executor(reuse=True).shutdown(wait=True)
    monitor = _function("tqdm", "TMonitor")
    for thread in threads:
        if monitor is not None and isinstance(thread, monitor):
            thread.exit()


def limit_threads(count: int) -> None:
    """Give every library that computes in threads `count` of them, in this process.

    Libraries that are loaded later find OMP_NUM_THREADS, which OpenBLAS and MKL read too; where
    the environment has a number for one of these alone (OPENBLAS_NUM_THREADS), it is kept.
    """
    os.environ["OMP_NUM_THREADS"] = str(count)
    if _without_rayon:
        os.environ[_RAYON] = "false"
    for library in _libraries():
        own = os.environ.get(f"{library.internal_api.upper()}_NUM_THREADS", "")
        library.set_num_threads(int(own) if own.isdigit() else count)
    for module, name in _SETTERS.items():
        if callable(set_count := _function(module, name)):
            set_count(count)


_SETTERS = {"torch": "set_num_threads", "pyarrow": "set_cpu_count", "cv2": "setNumThreads"}
"""Libraries with a pool that is neither OpenMP's nor that of a BLAS library."""


def _function(module: str, name: str) -> Any:
    """What a module has, if it is loaded; None if not, or if it is another one of that name."""
    return getattr(sys.modules.get(module), name, None)


def _libraries(api: str | None = None) -> list[Any]:
    """The loaded libraries that threadpoolctl knows; `api`: "openmp" or "blas"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of two OpenMP libraries; a filter may raise
        found = threadpoolctl.ThreadpoolController().lib_controllers
    return [library for library in found if api in (None, library.user_api)]


@dataclass(frozen=True)
class Pool:
    """Threads that survive a fork: their library starts them anew in the child, or does without."""

    library: str
    """In the path of the library whose code the threads run."""
    why: str
    name: str | None = None
    """Of the threads, which tells them; None: they have the name of the process."""

    def has(self, thread: _Thread, process: str) -> bool:
        """Whether a thread is of this pool; `process`: the name of the process."""
        if self.name is not None:
            return thread.name == self.name
        return thread.name == process and self.library in thread.library


TOKENIZERS = Pool("/tokenizers.", "in a child it works without threads")
POOLS = (
    TOKENIZERS,
    Pool("openblas", "ended by its fork handler (blas_thread_shutdown), started when needed"),
    Pool("/libarrow.", "Arrow's fork handlers start its pools anew (arrow::internal::AtFork)"),
    Pool("/libarrow.", "jemalloc's fork handlers start it anew", "jemalloc_bg_thd"),
    Pool("/libtorch_cpu.", "pthreadpool of torch.set_num_threads: its fork handler makes it anew"),
    Pool("/pypocketfft.", "scipy.fft with workers: ended and started by its fork handlers"),
    Pool("/numexpr/interpreter.", "looks whether the process is another one, and starts them anew"),
    Pool("/numba/np/ufunc/workqueue.", "its fork handler has them started anew"),
)
"""Each measured: tests/worker/test_fork_safety.py forks after it, and works in the children."""


class ForkSafetyCheck:
    """Whether what the prelude has done to this process forbids to fork ranks after it.

    Measured with torch 2.9 and torch_xla 2.9: after a backward pass in the parent, backward on an
    XLA tensor fails in a child with an internal assertion; an initialised XLA runtime does not
    survive a fork.
    """

    def __init__(self) -> None:
        self._backward = False
        self._watch = EngineWatch(self._note_backward)
        self._before = set(os.listdir(_TASKS))

    def _note_backward(self) -> None:
        self._backward = True

    def close(self) -> None:
        """Stop watching for backward passes."""
        self._watch.close()

    def problem(self) -> str | None:
        """The first thing that forbids a fork, as a verb phrase after the cell's name, or None."""
        if runtime.is_running():
            return "uses an XLA device"
        if self._backward:
            return "runs a backward pass"
        if _numba_uses_openmp():
            return "uses numba's threads (OpenMP)"
        pause_thread_pools()
        names = _threads_that_go_on(self._before)
        if names:
            count = f"{len(names)} threads" if len(names) > 1 else "a thread"
            return f"leaves {count} running ({', '.join(sorted(set(names))[:3])})"
        return None


def _numba_uses_openmp() -> bool:
    """Whether it has used OpenMP: numba ends a child that does so after its parent."""
    if "numba" not in sys.modules:
        return False
    try:
        return bool(sys.modules["numba"].threading_layer() == "omp")
    except ValueError:  # no parallel code has run
        return False


def _threads_that_go_on(before: set[str]) -> list[str]:
    """The names of threads that forbid a fork, of those that were not there `before`.

    Some end in a moment (those of a DataLoader that has just been dropped), some at a fork, by
    fork handlers of their library: a child that ends at once shows it. And what a thread runs
    cannot be seen while it is busy.
    """
    names = _unknown_threads(before)
    until = time.monotonic() + PATIENCE
    if names:
        run_in_fork(lambda: True)
        names = _unknown_threads(before)
    while names and time.monotonic() < until:
        time.sleep(0.02)
        names = _unknown_threads(before)
    return names


def _unknown_threads(before: set[str]) -> list[str]:
    own = Path("/proc/self/comm").read_text().strip()
    unknown = []
    for thread in _other_threads(before):
        if not any(pool.has(thread, own) for pool in POOLS):
            library = os.path.basename(thread.library)
            unknown.append(library if library and thread.name == own else thread.name)
    return unknown


def _tokenizers_has_threads() -> bool:
    return "tokenizers" in sys.modules and any(
        not thread.library or TOKENIZERS.library in thread.library  # a busy one cannot be seen
        for thread in _other_threads(set())
    )


# x86-64's calls: relative, and by a register or memory (opcode FF, extension 2), without prefixes.
_CALL = re.compile(
    rb"(?:\xe8.{4}|\xff[\x10-\x13\x16\x17\xd0-\xd7]|\xff\x14.|\xff[\x50-\x53\x55-\x57].|\xff\x54.."
    rb"|\xff[\x15\x90-\x93\x95-\x97].{4}|\xff\x94.{5})\Z",
    re.DOTALL,
)


@dataclass(frozen=True)
class _Thread:
    name: str
    library: str
    """Whose code it runs: a path; "" if that cannot be seen, or if it is a thread of Python."""


def _other_threads(but: set[str]) -> list[_Thread]:
    tasks = set(os.listdir(_TASKS)) - but - {str(threading.get_native_id())}
    python = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    memory: _Memory | None = None
    found = [_Thread(python[task], "") for task in tasks & python.keys()]
    for task in tasks - python.keys():
        memory = memory or _Memory()
        try:
            name = (_TASKS / task / "comm").read_text().strip()
            found.append(_Thread(name, memory.library_of(task)))
        except (FileNotFoundError, ProcessLookupError):
            pass  # it ended between the two looks
    return found


class _Memory:
    """What is mapped into this process."""

    _SYSTEM = ("/libc.", "/libc-", "/libpthread", "/libstdc++", "/ld-linux")

    def __init__(self) -> None:
        self._areas: list[tuple[int, int]] = []
        self._code: list[tuple[int, int, str]] = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, mode, _, _, _, *path = line.split(maxsplit=5)
            first, end = (int(number, 16) for number in span.split("-"))
            self._areas.append((first, end))
            if "x" in mode and path and path[0].startswith("/"):
                self._code.append((first, end, path[0]))

    def library_of(self, task: str) -> str:
        """The path of the library whose code a waiting thread runs; "" if it cannot be seen.

        It is the innermost one, but for the system's, that a call on the thread's stack returns
        to. Pointers to functions are there as well, and what was left by earlier calls.
        """
        try:
            fields = (_TASKS / task / "syscall").read_text().split()
            stack = self._stack(int(fields[-2], 16)) if len(fields) > 2 else b""
        except OSError:  # not every kernel, and not every container, shows them
            return ""
        starts = [first for first, _, _ in self._code]
        for address in array.array("Q", stack[: len(stack) // 8 * 8]):
            index = bisect.bisect(starts, address) - 1
            if index < 0 or address >= self._code[index][1]:
                continue
            path = self._code[index][2]
            if not any(name in path for name in self._SYSTEM) and self._is_return(address):
                return path
        return ""

    def _is_return(self, address: int) -> bool:
        """Whether the instruction before an address is a call; on other processors, whether it
        may be one.
        """
        if platform.machine() != "x86_64":
            return True
        return _CALL.search(self._read(address - 8, 8)) is not None

    def _stack(self, pointer: int) -> bytes:
        ends = [end for first, end in self._areas if first <= pointer < end]
        return self._read(pointer, min(ends[0] - pointer, 1 << 18)) if ends else b""

    def _read(self, address: int, size: int) -> bytes:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            return os.pread(memory.fileno(), size, address)
