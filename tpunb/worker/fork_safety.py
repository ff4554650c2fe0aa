"""Forks of a process that has used threads: which pools to end first, and what forbids a fork.

Only the forking thread survives in the child, and locks held by other threads stay locked. A
thread pool is no obstacle if its library restarts it: OpenMP's after this module has paused it,
others by their own fork handlers (`POOLS`). Other threads, a backward pass, and an XLA runtime
forbid a fork; measurements are in docs/forks.md.
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

from tpunb.backends import current
from tpunb.backends.engine_watch import EngineWatch
from tpunb.utils import processes

PATIENCE = 2.0
"""Seconds that a thread may keep running after a cell before it forbids a fork."""
CHILD_WAIT = 10.0
"""Seconds for a fork to end that takes milliseconds, but in which a fork handler may hang."""
_PAUSE_HARD = 2  # omp_pause_hard, OpenMP 5.0: free the threads and all else until the next region
_TASKS = Path("/proc/self/task")
_RAYON = "TOKENIZERS_PARALLELISM"
_without_rayon = False
"""True if an ancestor of this process, before its fork, has used the threads of tokenizers."""


def fork() -> int:
    """`os.fork` after `pause_thread_pools`."""
    pause_thread_pools()
    return fork_paused()


def fork_paused() -> int:
    """`os.fork`, if nothing was computed since `pause_thread_pools`, which takes 5 ms."""
    global _without_rayon
    _without_rayon = _without_rayon or _tokenizers_has_threads()
    asked = os.environ.get(_RAYON)
    pid = -1
    try:
        if _without_rayon:  # otherwise its fork handler warns, and with "true" a child would hang
            os.environ[_RAYON] = "false"
        with warnings.catch_warnings():
            # Python 3.12 warns if there are other threads, and jax, once imported, at every fork.
            warnings.simplefilter("ignore")
            pid = os.fork()
    finally:
        if pid and _without_rayon:
            del os.environ[_RAYON]
            if asked is not None:
                os.environ[_RAYON] = asked
    return pid


def run_in_fork(function: Callable[[], bool]) -> bool:
    """Call a function in a fork, which then ends; return its result. False if it is unknown.

    Signals are blocked meanwhile, for at most `CHILD_WAIT`.
    """
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
                return processes.wait_for_child(pid, CHILD_WAIT) == 0
            return False
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def pause_thread_pools() -> None:
    """End the threads of libraries that restart them when they next need them.

    These are the threads of every loaded OpenMP library (torch and scikit-learn each have their
    own), of joblib's worker processes, of OpenCV, and of tqdm's monitor. Call it in the thread that
    forks: an OpenMP pool belongs to the thread that started it.
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


def thread_count(variable: str | None) -> int | None:
    """Return the number of threads that a value of OMP_NUM_THREADS asks for; None if it is none.

    '4,2' is valid, too: 4 threads, and 2 for each of them in a region inside a region (OpenMP 3.1).
    """
    first = (variable or "").partition(",")[0].strip()
    return int(first) or None if first.isdecimal() else None


def limit_threads(count: int) -> None:
    """Limit every library that computes in threads to `count` of them, in this process.

    Libraries loaded later read OMP_NUM_THREADS, as do OpenBLAS and MKL; a variable for one
    library alone (OPENBLAS_NUM_THREADS) takes precedence.
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
"""Functions that set the number of threads, of libraries with a pool beyond OpenMP and BLAS."""


def _function(module: str, name: str) -> Any:
    """A module's attribute; None if the module is not loaded, or is another one of that name."""
    return getattr(sys.modules.get(module), name, None)


def _libraries(api: str | None = None) -> list[Any]:
    """The loaded libraries that threadpoolctl knows; `api`: "openmp" or "blas"."""
    with warnings.catch_warnings():
        # It warns if there are two OpenMP libraries, and a filter may turn that into an error.
        warnings.simplefilter("ignore")
        found = threadpoolctl.ThreadpoolController().lib_controllers
    return [library for library in found if api in (None, library.user_api)]


@dataclass(frozen=True)
class Pool:
    """Threads that do not forbid a fork: their library restarts them in the child, or uses none."""

    library: str
    """Part of the path of the library whose code the threads run."""
    why: str
    name: str | None = None
    """The threads' name, by which they are known; None if they have the name of the process."""

    def has(self, thread: _Thread, process: str) -> bool:
        """True if the thread belongs to this pool; `process`: the name of the process."""
        if self.name is not None:
            return thread.name == self.name
        return thread.name == process and self.library in thread.library


TOKENIZERS = Pool("/tokenizers.", "in a child it works without threads")
POOLS = (
    TOKENIZERS,
    Pool("openblas", "ended by its fork handler (blas_thread_shutdown), started when needed"),
    Pool("/libarrow.", "Arrow's fork handlers restart its pools (arrow::internal::AtFork)"),
    Pool("/libarrow.", "jemalloc's fork handlers restart it", "jemalloc_bg_thd"),
    Pool("/libtorch_cpu.", "pthreadpool of torch.set_num_threads: remade by its fork handler"),
    Pool("/pypocketfft.", "scipy.fft with workers: ended and restarted by its fork handlers"),
    Pool("/numexpr/interpreter.", "detects that the process is another one, and restarts them"),
    Pool("/numba/np/ufunc/workqueue.", "its fork handler has them restarted"),
)
"""Each was measured: tests/worker/test_fork_safety.py forks after using it, and uses it in the
children."""


class ForkSafetyCheck:
    """Checks whether the prelude has left this process in a state that forbids forking ranks.

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
        """The first reason against a fork, as a verb phrase to follow the cell's name, or None."""
        if (problem := current.backend().fork_problem()) is not None:
            return problem
        if self._backward:
            return "runs a backward pass"
        if _numba_uses_openmp():
            return "uses numba's threads (OpenMP)"
        pause_thread_pools()
        names = _lasting_threads(self._before)
        if names:
            count = f"{len(names)} threads" if len(names) > 1 else "a thread"
            return f"leaves {count} running ({', '.join(sorted(set(names))[:3])})"
        return None


def _numba_uses_openmp() -> bool:
    """True if numba has used OpenMP: it aborts a child that does so after its parent."""
    if "numba" not in sys.modules:
        return False
    try:
        return bool(sys.modules["numba"].threading_layer() == "omp")
    except ValueError:  # no parallel code has run
        return False


def _lasting_threads(before: set[str]) -> list[str]:
    """The names of the threads that forbid a fork, without those that existed `before`.

    Some threads end within a moment (those of a DataLoader that was just dropped), others at a
    fork, by their library's fork handlers: a test fork, whose child ends at once, shows that. And
    the code that a thread runs cannot be seen while the thread is busy.
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
        not thread.library or TOKENIZERS.library in thread.library  # unknown: a busy thread
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
    """Path of the library whose code it runs; "" if it cannot be seen, or for a Python thread."""


def _other_threads(known: set[str]) -> list[_Thread]:
    tasks = set(os.listdir(_TASKS)) - known - {str(threading.get_native_id())}
    python = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    memory: _Memory | None = None
    found = [_Thread(python[task], "") for task in tasks & python.keys()]
    for task in tasks - python.keys():
        memory = memory or _Memory()
        try:
            name = (_TASKS / task / "comm").read_text().strip()
            found.append(_Thread(name, memory.library_of(task)))
        except (FileNotFoundError, ProcessLookupError):
            pass  # the thread has ended in the meantime
    return found


class _Memory:
    """The memory mappings of this process."""

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

        It is the innermost library, other than the system's, to which a call on the thread's stack
        returns. The stack also has pointers to functions, and remains of earlier calls.
        """
        try:
            fields = (_TASKS / task / "syscall").read_text().split()
            stack = self._stack(int(fields[-2], 16)) if len(fields) > 2 else b""
        except OSError:  # not every kernel or container shows system calls
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
        """True if the instruction before an address is a call; always on processors but x86-64."""
        if platform.machine() != "x86_64":
            return True
        return _CALL.search(self._read(address - 8, 8)) is not None

    def _stack(self, pointer: int) -> bytes:
        ends = [end for first, end in self._areas if first <= pointer < end]
        return self._read(pointer, min(ends[0] - pointer, 1 << 18)) if ends else b""

    def _read(self, address: int, size: int) -> bytes:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            return os.pread(memory.fileno(), size, address)
