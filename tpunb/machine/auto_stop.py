"""`--stop-when-done`: stops this TPU VM once it is no longer in use.

`AutoStop.order` writes an order and starts a separate process for it, the watcher, because the
kernel may be gone by then. The watcher checks the machine once a second:

    waiting ── nothing uses the machine ──> counting ── the countdown is over ──> stopped | failed
       ^                                       │
       └── a run, a cell, a process with the TPU
    waiting, counting ── the order was removed, or the user has stopped the run ──> kept

Kernels and watcher communicate through a folder of the user:

    order.json      what to stop, and when; removing or replacing it ends its watcher
    status.json     what the watcher waits for, or how many seconds are left
    kernels/<pid>   one file for each kernel with tpunb; locked while a cell runs
    watcher.log     the output of watchers
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Any, TypeVar

from tpunb.machine import machine, metadata, tpu_users
from tpunb.runs import bucket_copies, directory, state
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import StopCause
from tpunb.utils import interrupts, processes, records, tools
from tpunb.utils.errors import SetupError
from tpunb.utils.files import write_json
from tpunb.utils.tools import ToolError, ToolProblem

T = TypeVar("T")
COUNTDOWN = 60.0
"""Seconds of warning, in which the user can cancel."""
INTERVAL = 1.0
"""Seconds between two checks of the watcher."""
TRIES = 3
"""Attempts to stop the machine with gcloud."""
KEEP = "Keep it: %tpu_setup --keep-running (in a terminal: tpunb keep)"
_OTHER_PLATFORMS = {
    "kaggle": "a Kaggle session, which costs quota: «Stop session» ends it; a batch run ends by "
    "itself",
    "colab": "a Colab runtime: `from google.colab import runtime; runtime.unassign()` ends it",
}
"""Platforms where `--stop-when-done` cannot stop the machine, and how each one ends."""

# --- The machine ---


@dataclass(frozen=True)
class TpuVm:
    name: str
    zone: str
    project: str
    accelerator_type: str
    address: str
    """The machine's address, unique in its network."""

    def check(self) -> None:
        """Raise SetupError unless Google Cloud has this machine under this name and can stop it.

        `projects.locations.nodes.stop` "is only available with single TPU nodes" (Cloud TPU API,
        reference), and a spot VM cannot be started again (Cloud TPU, Manage TPU Spot VMs).
        """
        printed = self._gcloud("describe", "--format=json")
        try:
            node = tools.read_json(_Node, printed, "gcloud compute tpus tpu-vm describe")
        except ToolError as error:
            raise _refused(str(error)) from None
        addresses = [endpoint.get("ipAddress") for endpoint in node.networkEndpoints or ()]
        scheduling = node.schedulingConfig or {}
        what = ""
        if len(addresses) > 1:
            what = f"one of {len(addresses)} hosts of a TPU slice, which cannot be stopped"
        elif scheduling.get("spot") or scheduling.get("preemptible"):
            what = "a spot VM, which cannot be started again after a stop"
        if what:
            raise _refused(
                f"this is {what}. Upload results (`%tpu_data DIR --upload gs://…`), then `gcloud "
                f"compute tpus tpu-vm delete {self.name} --zone={self.zone} "
                f"--project={self.project}` on another machine"
            )
        if addresses != [self.address] or node.acceleratorType != self.accelerator_type:
            raise _refused(
                f"the TPU VM that Google Cloud lists as {self.name} in {self.zone} is another "
                f"machine: {node.acceleratorType} at {', '.join(map(str, addresses))}, not this "
                f"{self.accelerator_type} at {self.address}"
            )
        if node.state != "READY":
            raise _refused(f"the state of {self.name} is {node.state}, not READY")

    def stop(self) -> None:
        """Stop the machine and keep its disks. Raises SetupError if gcloud fails."""
        self._gcloud("stop", "--async")

    def _gcloud(self, verb: str, option: str) -> str:
        words = ["gcloud", "compute", "tpus", "tpu-vm", verb, self.name, f"--zone={self.zone}"]
        words += [f"--project={self.project}", "--quiet", option]
        try:
            return tools.call(words, timeout=120)  # gcloud is slow to start
        except ToolError as error:
            reason = " ".join(str(error).split())
            if error.problem is ToolProblem.MISSING:
                reason = "gcloud is not installed, or not on PATH"
            elif error.problem is ToolProblem.FAILED:
                reason += (
                    ". The machine's service account needs the role TPU Admin, and the machine "
                    "the scope cloud-platform"
                )
            raise _refused(reason) from None


@dataclass(frozen=True)
class _Node:
    """What gcloud prints about a TPU VM, as far as it is needed."""

    state: str | None = None
    acceleratorType: str | None = None  # noqa: N815 (as gcloud prints it, like the names below)
    networkEndpoints: tuple[Mapping[str, Any], ...] | None = None  # noqa: N815
    schedulingConfig: Mapping[str, Any] | None = None  # noqa: N815


def find_tpu_vm(env: Mapping[str, str]) -> TpuVm:
    """The TPU VM that this process runs on, identified by its metadata server.

    Raises SetupError if this is not a TPU VM, or if it cannot be stopped. Calls gcloud, which takes
    some seconds.
    """
    here = machine.detect_machine(env, patience=metadata.PATIENCE)
    if here.platform in _OTHER_PLATFORMS:
        raise _refused(f"this is {_OTHER_PLATFORMS[here.platform]}")
    if here.platform != "gcp-tpu-vm":
        raise _refused(f"this machine is not recognised as a TPU VM of Google Cloud ({here.kind})")
    keys = ("NODE_ID", "ZONE", "CONSUMER_PROJECT_ID", "ACCELERATOR_TYPE")
    values = [here.metadata.tpu_env.get(key, "") for key in keys]
    values.append(here.metadata.values.get("ip", ""))
    # A Compute Engine machine has a tpu-env too, with the number 0 as its name.
    if not all(values) or values[0] == "0":
        raise _refused(
            "this machine's metadata server does not name it as a TPU VM. If it was created with "
            "Compute Engine, `gcloud compute instances stop` stops it"
        )
    vm = TpuVm(*values)
    vm.check()
    return vm


def _refused(reason: str) -> SetupError:
    return SetupError(f"--stop-when-done cannot stop this machine: {reason}")


# --- The order ---


class StopPhase(str, Enum):
    """The watcher's state."""

    WAITING = "waiting"
    COUNTING = "counting"
    STOPPED = "stopped"
    KEPT = "kept"
    FAILED = "failed"


@dataclass(frozen=True)
class StopStatus:
    phase: StopPhase
    reason: str = ""
    """What the watcher waits for, why the machine is kept running, or what has failed."""
    seconds_left: float = 0.0
    """Rest of the countdown."""

    @property
    def ended(self) -> bool:
        return self.phase not in (StopPhase.WAITING, StopPhase.COUNTING)

    def describe(self, vm: TpuVm) -> str:
        """The line that the cell displays."""
        minutes, seconds = divmod(round(self.seconds_left), 60)
        countdown = f"will be stopped in {minutes}:{seconds:02d}, unless a cell runs. {KEEP}"
        text = {
            StopPhase.WAITING: f"will be stopped; waiting: {self.reason}. {KEEP}",
            StopPhase.COUNTING: countdown,
            StopPhase.STOPPED: "is being stopped; its disks are kept, and still cost a little",
            StopPhase.FAILED: f"IS STILL RUNNING, and costs money: {self.reason}",
            StopPhase.KEPT: "is kept running" + (f": {self.reason}" if self.reason else ""),
        }[self.phase]
        return f"TPU VM {vm.name} {text}"


@dataclass(frozen=True)
class StopOrder:
    vm: TpuVm
    runs: str
    """The folder of runs: while any of them is active, the machine is not stopped."""
    since: float
    """Time of the order, in seconds since the epoch."""
    run: str | None = None
    """The folder of the run to wait for; None: any run that ends after the order."""
    idle: float | None = None
    """Seconds without any use before the stop; None: stop after the run's end and a countdown."""
    countdown: float = COUNTDOWN


def order_stop(order: StopOrder) -> subprocess.Popen[bytes]:
    """Write the order, replacing an earlier one, and start its watcher."""
    folder = _folder()
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # fails if the folder belongs to another user
    (folder / "status.json").unlink(missing_ok=True)
    write_json(folder / "order.json", asdict(order))
    with open(folder / "watcher.log", "ab") as log:
        return interrupts.start_in_own_session(  # the watcher outlives the kernel
            "from tpunb.machine import auto_stop; auto_stop.main()",
            json.dumps(asdict(order)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
        )


def keep_running() -> str:
    """Cancel the order; return a message for the user."""
    try:
        (_folder() / "order.json").unlink()
    except FileNotFoundError:
        return "no shutdown is scheduled"
    return "this machine is kept running"


def read_order() -> StopOrder | None:
    """The order, if there is one."""
    return _read(StopOrder, "order.json")


def read_status() -> StopStatus | None:
    """The watcher's latest status; None before its first."""
    return _read(StopStatus, "status.json")


def _read(kind: type[T], name: str) -> T | None:
    try:
        return records.build(kind, records.read_dict(_folder() / name))
    except ValueError:
        return None


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpunb" / "stop"


# --- The kernel ---


class AutoStop:
    """A kernel's part: shows the watcher when a cell runs, and the user the watcher's status."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def begin_cell(self, info: Any = None) -> None:
        """Lock this kernel's file, if there is an order. The lock ends with the kernel."""
        if self._file is None and read_order() is not None:  # perhaps from another notebook
            self._file = open(_folder() / "kernels" / str(os.getpid()), "w")  # noqa: SIM115
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def end_cell(self, result: Any = None) -> None:
        """Unlock this kernel's file."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Remove this kernel's file. Its order stays in force when the kernel is gone."""
        if self._file is not None:
            Path(self._file.name).unlink(missing_ok=True)
            self._file.close()

    def order(self, order: StopOrder, show: Callable[[str], None], *, live: bool) -> None:
        """Give an order in a running cell, and `show` the watcher's status in the cell.

        `live`: each line shown replaces the one before. Otherwise two lines are shown: that the
        machine will be stopped, and the outcome.
        """
        watcher = order_stop(order)
        self.begin_cell()
        show(StopStatus(StopPhase.WAITING, "this cell runs").describe(order.vm))

        def follow() -> None:
            while watcher.poll() is None:
                time.sleep(INTERVAL)
                if live and (status := read_status()) is not None:
                    show(status.describe(order.vm))
            status = read_status()
            if status is None or not status.ended:  # cancelled
                status = StopStatus(StopPhase.KEPT)
            show(status.describe(order.vm))

        threading.Thread(target=follow, name="tpunb-auto-stop", daemon=True).start()


# --- The watcher ---


def watch(order: StopOrder, clock: Callable[[], float] = time.monotonic) -> Iterator[StopStatus]:
    """Check the machine before each status that is yielded; stop it when it is time.

    Ends after the final status, or when the order was removed or replaced.
    """
    stop_at, failures = None, 0
    while read_order() == order:
        result = state.read_result(RunDir(order.run)) if order.run else None
        if result is not None and result.stop and result.stop.cause is StopCause.USER:
            reason = f"a user ended run {result.dir.name} ({result.reason})"
            yield StopStatus(StopPhase.KEPT, reason)
            return
        if reason := reason_to_wait(order):
            stop_at = None
            yield StopStatus(StopPhase.WAITING, reason)
            continue
        now = clock()
        if stop_at is None:
            stop_at = now + max(order.idle or 0.0, order.countdown)
        if now < stop_at:
            yield StopStatus(StopPhase.COUNTING, seconds_left=stop_at - now)
            continue
        try:
            order.vm.check()
            if read_order() == order and not reason_to_wait(order):  # gcloud is slow
                order.vm.stop()
                yield StopStatus(StopPhase.STOPPED)
                return
        except SetupError as error:
            failures += 1
            stop_at = now + order.countdown
            if failures >= TRIES:
                yield StopStatus(StopPhase.FAILED, str(error))
                return


def carry_out(order: StopOrder) -> None:
    """Watch until the final status, writing each one to `status.json`."""
    for status in watch(order):
        if status.ended:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            print(when, order.vm.name, status.phase.value, status.reason, flush=True)
        with contextlib.suppress(OSError):  # a full disk must not keep the machine running
            write_json(_folder() / "status.json", asdict(status))
        if status.ended and read_order() == order:
            keep_running()
        time.sleep(0 if status.ended else INTERVAL)


def reason_to_wait(order: StopOrder) -> str:
    """A phrase for what still uses the machine; '' if nothing does."""
    runs = directory.list_runs(Path(order.runs)) + ([RunDir(order.run)] if order.run else [])
    ended = False
    for run in runs:
        if state.run_state(run).active:
            return f"run {run.id} is active"
        if bucket_copies.is_copying(run):
            return f"run {run.id} is being copied to its bucket"
        result = state.read_result(run)
        ended |= result is not None and result.ended >= order.since
    if order.idle is None and order.run is None and not ended:
        return "no run has ended since the order"
    kernels = dict(_kernels())
    if busy := [pid for pid in kernels if kernels[pid]]:
        return f"a cell runs in a notebook (process {busy[0]})"
    for user in tpu_users.find_tpu_users(machine.root_of(os.environ)):
        # Kernels with a file are idle; a rank left over from an ended run does not count.
        if user.pid not in kernels and (user.kind != "run" or user.living):
            return f"{user.describe()} has the TPU"
    return ""


def _kernels() -> Iterator[tuple[int, bool]]:
    """Yield the pid of each living kernel, and whether a cell runs in it."""
    for path in (_folder() / "kernels").iterdir():
        with contextlib.suppress(FileNotFoundError), open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                yield int(path.name), True
                continue
            if Path(f"/proc/{path.name}").exists():
                yield int(path.name), False
            else:
                path.unlink()


def main() -> None:
    """Entry point of the watcher; its last argument is the order."""
    processes.set_title("stop when done")
    carry_out(records.build(StopOrder, records.parse(sys.argv[-1])))
