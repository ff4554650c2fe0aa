"""One kernel's use of tpunb: its defaults, its warm agent, and one train cell from end to end."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

import tpunb
from tpunb import control, debug, interrupts, listings, panel, rundir, setup
from tpunb.background import BackgroundRun
from tpunb.data.quota import Asking
from tpunb.display.card import LEAVE
from tpunb.display.ranks import parse_ranks
from tpunb.display.view import View
from tpunb.errors import NotebookNotFoundError, RunError, TpunbError
from tpunb.events import Note
from tpunb.handoff import returns
from tpunb.launcher import Attached, Launcher, Run
from tpunb.models import Device, RunResult, RunSpec
from tpunb.money import Keeper, keep_running
from tpunb.notebook.history import History
from tpunb.platforms import chips, environment, machine, metadata, one_process, prices, report
from tpunb.platforms.machine import Machine
from tpunb.platforms.metadata import Metadata
from tpunb.platforms.one_process import OneProcess
from tpunb.platforms.tpu_vm import TpuVm
from tpunb.spmd import VARIABLE

if TYPE_CHECKING:
    from tpunb.models import Snapshot
    from tpunb.reading import Reading

RAN = "TPUNB_RAN"
"""A file, named in the environment, to which each run's folder is added (`tpunb run`)."""
_DEVICES: dict[str | None, Device | None] = {"tpu": "TPU", "cpu": "CPU", None: None}
CORES = "TPUNB_CORES"
"""Cores that a whole run of the notebook is to use, whatever its cells say (`tpunb run`)."""


class Session:
    """What the magics of one kernel share."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.history = History(shell)
        self.launcher = Launcher()
        self.runs = listings.default_folder()
        self.cores: int | None = None
        self.notebook: str | None = None
        self._told: Metadata | None = None
        debug.watch(shell)
        if chips.on_the_bus(machine.root_of(os.environ))[0] and (said := self.kernel_device()):
            print(f"{said}: so runs find the TPU free. `%tpu_setup --kernel tpu` asks for it")
        self.keeper = Keeper(shell)

    def close(self) -> None:
        """Let go of the kernel: no hook, no guard."""
        self.keeper.close()
        debug.unwatch(self.shell)
        self.history.close()
        self.launcher.close()

    def environ(self) -> dict[str, str]:
        """The kernel's environment, without what tpunb itself has put there."""
        env = dict(os.environ)
        if not self.chose_device():
            env.pop("PJRT_DEVICE", None)
        if debug.switched_spmd_on():
            env.pop(VARIABLE, None)
        return env

    def chose_device(self) -> bool:
        """Whether the kernel's PJRT_DEVICE is the person's choice."""
        return debug.is_persons(one.source for one in self.history.executions())

    def kernel_device(self, wanted: Device | None = None) -> str | None:
        """Choose the kernel's own XLA device; what to tell the person (`debug.kernel_device`)."""
        return debug.kernel_device(wanted, persons=self.chose_device())

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
        said = self.kernel_device(_DEVICES[chosen.kernel])
        if said and chosen.kernel and not chosen.json:
            print(said)
        if chosen.notebook is not None:
            # Looked at now: what is wrong with it shows here, and a later %cd changes nothing.
            path = Path(chosen.notebook).expanduser().absolute()
            if not path.is_file():
                raise NotebookNotFoundError(str(path), "%tpu_setup --notebook")
            self.notebook = str(path)
        if chosen.runs is not None:
            self.runs = listings.choose_folder(chosen.runs)
        if not chosen.no_warm and not setup.missing_xla():
            self.launcher.warm(self._env(here))
            # nbconvert takes two seconds to import; by the first train cell it is there.
            threading.Thread(target=_warm_up, name="tpunb-warm-up", daemon=True).start()

    def show(self, chosen: argparse.Namespace) -> None:
        """What `%tpu_setup` shows: a card, or everything as JSON. Raises where nothing can run."""
        here = self.machine()  # which has asked the metadata server
        state = "warm" if self.launcher.is_warm else "getting warm in the background"
        setup.show(
            report.look(
                self.environ(),
                runs=self.runs,
                cores=self.cores,
                told=here.metadata,
                imported=sys.modules,
                quota=Asking(self.environ()).answer,
            ),
            agent="" if chosen.no_warm else state,
            json=chosen.json,
        )
        if not chosen.no_warm:
            setup.need_xla("training")

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

    def _env(self, here: Machine, asked: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a run on this machine, with what `--env` asks for."""
        return environment.for_run(self.environ(), here.device, asked, here)

    def train(self, chosen: argparse.Namespace, cell: str) -> RunResult | BackgroundRun | None:
        """`%%tpu_train`, from the options and the cell's body to the result."""
        if chosen.detach and chosen.out is not None:
            raise UsageError(
                "%%tpu_train --out: a detached run has no result yet; "
                "`%tpu_attach --out VAR` binds it when it has"
            )
        here = self.machine()
        cores = self._cores(here, chosen.cores)
        _shown(chosen.logs, cores)  # what is wrong in any run is said before anything starts
        with interrupts.counted() as pressed:
            return self._train(chosen, cell, here, cores, pressed)

    def _train(
        self, chosen: argparse.Namespace, cell: str, here: Machine, cores: int, pressed: list[int],
    ) -> RunResult | BackgroundRun | None:  # fmt: skip
        asked = dict(chosen.env)
        if (refused := one_process.refused(asked, here)) is not None:
            raise UsageError(f"%%tpu_train --env {refused}")
        if chosen.resume is not None:
            asked["TPUNB_RESUME"] = self._checkpoints(chosen.resume)
        env = self._env(here, asked)
        vm = None
        if not chosen.dry_run:
            vm = self._to_stop(chosen, here, "%%tpu_train")
            setup.need_xla("%%tpu_train")
            if here.device == "TPU":
                setup.refuse_if_held(self.environ())
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
        one = one_process.look(self.environ(), asked, here, cores, read.script.spmd)
        if one is not None:
            env, cores = dict(one.env), one.cores
        if chosen.dry_run:
            from tpunb import plan

            changes = environment.changes(self.environ(), here.device, here)
            print(plan.describe(read, cores, here.device, changes, one))
            return None
        read.refuse()
        if pressed[0]:
            raise TpunbError("interrupted before the run began: nothing was started")
        name = chosen.name or read.snapshot.name
        ranks = cores if one is None else 1
        shown = _shown(chosen.logs, ranks)
        folder = rundir.create(self.runs, name)
        spec = RunSpec(
            id=folder.id,
            name=name,
            world_size=ranks,
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
            spmd=None if one is None else cores,
            profile=chosen.profile,
        )
        notes = _notes(read, spec, one)
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
            return self._in_background(run, read, shown, notes, chosen)
        view = View(run.spec, run.dir, logs=shown)
        result = self._follow(run, view, notes, pressed)
        self.launcher.remember(read.script, result, spec)
        return self._hand_over(result, chosen, folded=view.folds)

    def _in_background(
        self, run: Run, read: Reading, shown: frozenset[int], notes: tuple[str, ...],
        chosen: argparse.Namespace,
    ) -> BackgroundRun:  # fmt: skip
        handle = BackgroundRun(
            run,
            logs=shown,
            notes=notes,
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
        shown = _shown(chosen.logs, run.spec.world_size, "%tpu_attach")
        age = max(0.0, time.time() - folder.spec.stat().st_mtime)
        view = View(run.spec, folder, logs=shown, age=age, stop=LEAVE)
        with interrupts.counted() as pressed:
            for _ in panel.watched(run, view):
                if pressed[0]:
                    view.leave("goes on, and is not followed here any more")
                    print(f"run {folder.id} goes on; %tpu_stop {folder.id} stops it")
                    return None
            result = returns.collect(run.result(), run.spec)
            view.finish(result)
            panel.keep(result)
        return self._hand_over(result, chosen, folded=view.folds)

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

    def _cores(self, here: Machine, asked: Any) -> int:
        forced = os.environ.get(CORES)
        if forced is not None:
            wanted = None if forced == "all" else int(forced)
            return _checked(here, wanted, "tpunb run --cores")
        if asked is ...:
            return self.cores or _checked(here, None, "%%tpu_train --cores all")
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
        self, run: Run, view: View, notes: tuple[str, ...], pressed: list[int]
    ) -> RunResult:
        """Show the run until it has ended. The interrupt key stops it, twice at once."""
        for note in notes:
            view.show(Note(note))
        told = 0
        for _ in panel.watched(run, view):
            if pressed[0] > told:
                told = pressed[0]
                run.stop("interrupt", "interrupted in the notebook", now=told > 1)
        result = returns.collect(run.result(), run.spec)
        view.finish(result)
        panel.keep(result)
        return result

    def _hand_over(
        self, result: RunResult, chosen: argparse.Namespace, *, folded: bool
    ) -> RunResult:
        self.shell.user_ns.update(result.returns)
        if chosen.out is not None:
            self.shell.user_ns[chosen.out] = result
        tpunb.last_run = result
        if not chosen.no_raise:
            try:
                result.raise_for_failure()
            except RunError as error:
                error.folded = folded
                raise
        return result


def _shown(text: str, ranks: int, magic: str = "%%tpu_train") -> frozenset[int]:
    """The ranks that `--logs` names."""
    try:
        return parse_ranks(text, ranks)
    except ValueError as error:
        raise UsageError(f"{magic} --logs: {error}") from None


def _notes(read: Reading, spec: RunSpec, one: OneProcess | None) -> tuple[str, ...]:
    """What a person should know before the run begins."""
    how = None
    if one is not None:
        every = "all " if one.cores > 1 else ""
        how = f"SPMD: one process drives {every}{spec.counted()} ({one.why})"
    return (*filter(None, [how]), *read.snapshot.notes, *filter(None, [read.note()]))


def _warm_up() -> None:
    """Import and read what the first train cell needs of the kernel, also if it fails."""
    importlib.import_module("tpunb.reading")
    importlib.import_module("ipywidgets")
    importlib.import_module("tpunb.script.convert").warm_up()
    importlib.import_module("tpunb.diagnosis.table").rules()


def _detached(run: Attached) -> str:
    """How to come back to a run."""
    name, runs = run.spec.id, shlex.quote(str(run.dir.path.parent))
    return (
        f"run {name} goes on without this notebook, on {run.spec.counted()}\n"
        f"  follow it, and get its result: %tpu_attach {name}\n"
        f"  stop it: %tpu_stop {name}\n"
        f"  in a terminal: tpunb logs --follow {name} --runs {runs}\n"
        f"                 tpunb stop {name} --runs {runs}"
    )


def _checked(here: Machine, cores: int | None, option: str) -> int:
    if cores is None:
        cores = here.default_cores
    wrong = here.check_cores(cores)
    if wrong is not None:
        raise UsageError(f"{option}: {wrong}")
    return cores
