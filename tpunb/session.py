"""One kernel's use of tpunb: its defaults, its warm agent, and one train cell from end to end."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

import tpunb
from tpunb import control, debug, rundir, runs
from tpunb.background import BackgroundRun
from tpunb.display import frontend, setup
from tpunb.display.stream import parse_ranks
from tpunb.display.view import View
from tpunb.errors import DeviceBusyError, MissingPackageError, NotebookNotFoundError, TpunbError
from tpunb.events import Note
from tpunb.handoff import returns
from tpunb.launcher import Attached, Launcher, Run
from tpunb.models import RunResult, RunSpec
from tpunb.money import Keeper, keep_running
from tpunb.notebook.history import History
from tpunb.platforms import environment, holders, machine, metadata, prices, report
from tpunb.platforms.machine import Machine
from tpunb.platforms.metadata import Metadata
from tpunb.platforms.tpu_vm import TpuVm

if TYPE_CHECKING:
    from tpunb.models import Snapshot
    from tpunb.reading import Reading

RAN = "TPUNB_RAN"
"""A file, named in the environment, to which each run's folder is added (`tpunb run`)."""
CORES = "TPUNB_CORES"
"""Cores that a whole run of the notebook is to use, whatever its cells say (`tpunb run`)."""


class Session:
    """What the magics of one kernel share."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.history = History(shell)
        self.launcher = Launcher()
        self.runs = runs.default_folder()
        self.cores: int | None = None
        self.notebook: str | None = None
        self._told: Metadata | None = None
        shell.events.register("post_run_cell", debug.note_cell)
        self.keeper = Keeper(shell)

    def close(self) -> None:
        """Let go of the kernel: no hook, no guard."""
        self.keeper.close()
        self.shell.events.unregister("post_run_cell", debug.note_cell)
        self.history.close()
        self.launcher.close()

    def environ(self) -> dict[str, str]:
        """The kernel's environment, without what tpunb itself has put there."""
        env = dict(os.environ)
        if debug.chosen_by_us():
            del env["PJRT_DEVICE"]
        return env

    def machine(self) -> Machine:
        env = self.environ()
        if self._told is None:  # what it says of a machine stays as it is
            self._told = metadata.ask(env, machine.root_of(env), metadata.PATIENT)
        return machine.judge(env, machine.root_of(env), self._told)

    def setup(self, chosen: argparse.Namespace) -> None:
        """`%tpu_setup`: keep defaults for later cells, and get warm in the background."""
        here = self.machine()
        if chosen.cores is not ...:
            self.cores = _checked(here, chosen.cores, "%tpu_setup --cores")
        if chosen.kernel == "tpu" and not here.chips:
            raise UsageError("%tpu_setup --kernel tpu: this machine has no TPU")
        debug.kernel_device("TPU" if chosen.kernel == "tpu" else "CPU")
        if chosen.notebook is not None:
            # Looked at now: what is wrong with it shows here, and a later %cd changes nothing.
            path = Path(chosen.notebook).expanduser().absolute()
            if not path.is_file():
                raise NotebookNotFoundError(str(path), "%tpu_setup --notebook")
            self.notebook = str(path)
        if chosen.runs is not None:
            self.runs = Path(chosen.runs).expanduser().absolute()
        if not chosen.no_warm and not missing_xla():
            self.launcher.warm(self._env(here))
            # nbconvert takes two seconds to import; by the first train cell it is there.
            threading.Thread(target=_warm_up, name="tpunb-warm-up", daemon=True).start()

    def show(self, chosen: argparse.Namespace) -> None:
        """What `%tpu_setup` shows: a card, or everything as JSON. Raises where nothing can run."""
        self.machine()  # which has asked the metadata server
        found = report.look(
            self.environ(),
            runs=self.runs,
            cores=self.cores,
            told=self._told,
            imported=sys.modules,
        )
        kernel = os.environ.get("PJRT_DEVICE", "CPU")
        if chosen.json:
            print(json.dumps({**found.to_json(), "runs": str(self.runs), "kernel_device": kernel},
                             indent=1))  # fmt: skip
        else:
            state = "warm" if self.launcher.is_warm else "getting warm in the background"
            own = [("kernel", f"its own XLA device is the {kernel}")]
            if not chosen.no_warm:
                own.append(("agent", state))
            frontend.show(
                {"text/html": setup.card(found, own), "text/plain": setup.text(found, own)}
            )
        if not chosen.no_warm:
            need_xla("training")

    def stop_when_done(self, chosen: argparse.Namespace) -> None:
        """`%tpu_setup --stop-when-done` and `--keep-running`."""
        if chosen.keep_running:
            print(keep_running())
        elif (vm := self._to_stop(chosen, self.machine(), "%tpu_setup")) is not None:
            self.keeper.order(vm, self.runs, chosen.idle)

    def _to_stop(self, chosen: argparse.Namespace, here: Machine, magic: str) -> TpuVm | None:
        """The machine, if it is to be stopped; asked for and refused before anything begins."""
        if chosen.idle is not None and not chosen.stop_when_done:
            raise UsageError(f"{magic} --idle: it says when --stop-when-done stops the machine")
        return self.keeper.check(here, self.environ()) if chosen.stop_when_done else None

    def _env(self, here: Machine, asked: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
        """The environment of a run on this machine, with what `--env` asks for."""
        return environment.for_run(self.environ(), here.device, dict(asked), here)

    def _refuse_if_held(self, here: Machine) -> None:
        """Raise DeviceBusyError if somebody has the TPU who does not take turns with runs."""
        root = machine.root_of(os.environ)
        for look in range(2):
            held = [one for one in holders.look(root).holders if not one.living]
            if not held:
                return
            if look == 0:
                time.sleep(0.5)  # ranks of a run that has just ended may still be going
        first = held[0]
        cell = debug.taken_in() if first.kind == "this kernel" else None
        since = "" if cell is None else f" since cell [{cell}]"
        raise DeviceBusyError(f"{first.describe()}{since}", first.fix())

    def train(self, chosen: argparse.Namespace, cell: str) -> RunResult | BackgroundRun | None:
        """`%%tpu_train`, from the options and the cell's body to the result."""
        if chosen.detach and chosen.out is not None:
            raise UsageError(
                "%%tpu_train --out: a detached run has no result yet; "
                "`%tpu_attach --out VAR` binds it when it has"
            )
        here = self.machine()
        world_size = self._world_size(here, chosen.cores)
        try:
            shown = parse_ranks(chosen.logs, world_size)
        except ValueError as error:
            raise UsageError(f"%%tpu_train --logs: {error}") from None
        with _interrupts() as pressed:
            return self._train(chosen, cell, here, world_size, shown, pressed)

    def _train(
        self, chosen: argparse.Namespace, cell: str, here: Machine, world_size: int,
        shown: frozenset[int], pressed: list[int],
    ) -> RunResult | BackgroundRun | None:  # fmt: skip
        env = self._env(here, chosen.env)
        if chosen.resume is not None:
            env["TPUNB_RESUME"] = self._checkpoints(chosen.resume)
        vm = None
        if not chosen.dry_run:
            vm = self._to_stop(chosen, here, "%%tpu_train")
            need_xla("%%tpu_train")
            if here.device == "TPU":
                self._refuse_if_held(here)
            if chosen.fresh:
                self.launcher.put_away()
            self.launcher.warm(env)  # it imports while the notebook is converted
        from tpunb import reading  # it is much, and `%load_ext` must feel instant

        read = reading.read(
            self.history,
            cell,
            notebook=self.notebook,
            user_ns=self.shell.user_ns,
            replicate=chosen.replicate,
        )
        if chosen.dry_run:
            from tpunb import plan

            changes = environment.changes(self.environ(), here.device, here)
            print(plan.describe(read, world_size, here.device, changes))
            return None
        read.refuse()
        if pressed[0]:
            raise TpunbError("interrupted before the run began: nothing was started")
        name = chosen.name or read.snapshot.name
        folder = rundir.create(self.runs, name)
        spec = RunSpec(
            id=folder.id,
            name=name,
            world_size=world_size,
            device=here.device,
            cwd=os.getcwd(),
            sys_path=tuple(sys.path),
            blocks=read.script.blocks,
            returns=chosen.returns,
            grace=chosen.grace,
            timeout=chosen.timeout,
            hang_timeout=chosen.hang_timeout,
            retries=chosen.retries,
            price=prices.of(here),
            replicate=read.replicate,
        )
        slim = replace(read.snapshot, content=None)
        run = self.launcher.start(folder, spec, read.script, slim, env, detached=chosen.detach)
        if vm is not None:
            self.keeper.order(vm, self.runs, chosen.idle, folder.path)
        self._keep_notebook(read.snapshot, folder)
        if RAN in os.environ:
            rundir.append(Path(os.environ[RAN]), f"{folder.path}\n")
        if isinstance(run, Attached):
            print(_detached(run))
            return None
        if chosen.bg:
            return self._in_background(run, read, shown, chosen)
        result = self._follow(run, shown, _notes(read), pressed)
        self.launcher.remember(read.script, result, spec)
        return self._hand_over(result, chosen)

    def _in_background(
        self, run: Run, read: Reading, shown: frozenset[int], chosen: argparse.Namespace
    ) -> BackgroundRun:
        handle = BackgroundRun(
            run,
            logs=shown,
            notes=_notes(read),
            raises=not chosen.no_raise,
            bind=self.shell.user_ns.update,
            ended=lambda result: self.launcher.remember(read.script, result, run.spec),
        )
        if chosen.out is not None:
            self.shell.user_ns[chosen.out] = handle
        return handle

    def attach(self, chosen: argparse.Namespace) -> RunResult | None:
        """`%tpu_attach`: everything from the run's start, then until its end, or an interrupt."""
        folder = control.living(self.runs, chosen.run)
        run = Attached(folder)
        try:
            shown = parse_ranks(chosen.logs, run.spec.world_size)
        except ValueError as error:
            raise UsageError(f"%tpu_attach --logs: {error}") from None
        age = max(0.0, time.time() - folder.spec.stat().st_mtime)
        view = View(run.spec, folder, logs=shown, age=age)
        with _interrupts() as pressed:
            for event in run.events():
                if event is None:
                    view.tick()
                else:
                    view.show(event)
                if pressed[0]:
                    view.leave("goes on, and is not followed here any more")
                    print(f"run {folder.id} goes on; %tpu_stop {folder.id} stops it")
                    return None
            result = returns.collect(run.result(), run.spec)
            view.finish(result)
        return self._hand_over(result, chosen)

    def stop(self, wanted: str | None) -> None:
        """`%tpu_stop`: ask, and wait until the run has ended."""
        for line in control.stop(control.living(self.runs, wanted), "stopped with %tpu_stop"):
            print(line, flush=True)

    def _checkpoints(self, wanted: str) -> str:
        """`--resume`: a run's checkpoints, or the folder or URL of some."""
        if "://" in wanted or Path(wanted).is_dir():
            return wanted if "://" in wanted else str(Path(wanted).absolute())
        run = rundir.find(self.runs, wanted)
        if not run.checkpoints.is_dir():
            raise TpunbError(
                f"run {run.id} has left no checkpoint to go on from: "
                "`tpunb.save(state, step)` in its train cell writes them"
            )
        return str(run.checkpoints)

    def _world_size(self, here: Machine, asked: Any) -> int:
        forced = os.environ.get(CORES)
        if forced is not None:
            wanted = None if forced == "all" else int(forced)
            return _checked(here, wanted, "tpunb run --cores")
        if asked is ...:
            return self.cores or here.default_cores
        return _checked(here, asked, "%%tpu_train --cores")

    def _keep_notebook(self, snapshot: Snapshot, folder: rundir.RunDir) -> None:
        """The whole notebook, as it was found; `notebook.json` holds what was captured of it."""
        kept = folder.path / "notebook.ipynb"
        kept.touch(0o600)
        if snapshot.content is not None:
            kept.write_text(snapshot.content, encoding="utf-8")
        elif snapshot.path is not None and Path(snapshot.path).is_file():
            shutil.copyfile(snapshot.path, kept)
        else:
            kept.unlink()

    def _follow(
        self, run: Run, shown: frozenset[int], notes: tuple[str, ...], pressed: list[int]
    ) -> RunResult:
        """Show the run until it has ended. The interrupt key stops it, twice at once."""
        view = View(run.spec, run.dir, logs=shown)
        for note in notes:
            view.show(Note(note))
        told = 0
        for event in run.events():
            if event is None:
                view.tick()
            else:
                view.show(event)
            if pressed[0] > told:
                told = pressed[0]
                run.stop("interrupt", "interrupted in the notebook", now=told > 1)
        result = returns.collect(run.result(), run.spec)
        view.finish(result)
        return result

    def _hand_over(self, result: RunResult, chosen: argparse.Namespace) -> RunResult:
        self.shell.user_ns.update(result.returns)
        if chosen.out is not None:
            self.shell.user_ns[chosen.out] = result
        tpunb.last_run = result
        if not chosen.no_raise:
            result.raise_for_failure()
        return result


def _notes(read: Reading) -> tuple[str, ...]:
    """What a person should know before the run begins."""
    return (*read.snapshot.notes, *filter(None, [read.note()]))


def _warm_up() -> None:
    """Import and read what the first train cell needs of the kernel, also if it fails."""
    importlib.import_module("tpunb.reading")
    importlib.import_module("tpunb.script.convert").warm_up()
    importlib.import_module("tpunb.diagnosis.table").rules()


def _detached(run: Attached) -> str:
    """How to come back to a run."""
    name, runs = run.spec.id, shlex.quote(str(run.dir.path.parent))
    return (
        f"run {name} goes on without this notebook, on {run.spec.world_size} "
        f"{'rehearsal' if run.spec.device == 'CPU' else 'TPU'} cores\n"
        f"  follow it, and get its result: %tpu_attach {name}\n"
        f"  stop it: %tpu_stop {name}\n"
        f"  in a terminal: tpunb logs --follow {name} --runs {runs}\n"
        f"                 tpunb stop {name} --runs {runs}"
    )


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Count presses of the interrupt key instead of raising in the middle of something.

    In the middle of an import as well, of which nbconvert brings many.

    Signal handlers belong to the main thread; a cell that runs elsewhere goes without.
    """
    pressed = [0]

    def count(number: int, frame: object) -> None:
        pressed[0] += 1

    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.signal(signal.SIGINT, count)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _checked(here: Machine, cores: int | None, option: str) -> int:
    if cores is None:
        return here.default_cores
    wrong = here.check_cores(cores)
    if wrong is not None:
        raise UsageError(f"{option}: {wrong}")
    return cores


def need_xla(what: str) -> None:
    """Raise MissingPackageError if torch_xla is not there."""
    for package in missing_xla():
        raise MissingPackageError(
            package, what, "`pip install 'tpunb[xla]'` brings a matching pair"
        )


def missing_xla() -> list[str]:
    """Which of torch and torch_xla are not there. Looks, without importing them."""
    return [name for name in ("torch", "torch_xla") if importlib.util.find_spec(name) is None]
