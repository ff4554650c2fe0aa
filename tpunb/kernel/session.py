"""One kernel's use of tpunb: its defaults, and a train cell from its options to its result."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

from tpunb.diagnostics import cell as debug
from tpunb.display import front_end, html
from tpunb.display.front_end import FrontEnd
from tpunb.display.run_view import RunView, show_waiting
from tpunb.kernel import calls, cost, device, panel, setup
from tpunb.kernel.background import BackgroundRun
from tpunb.kernel.launcher import Attached, Launcher, Run
from tpunb.kernel.options import (
    LAST,
    AttachOptions,
    Cores,
    LaunchOptions,
    SetupOptions,
    TrainOptions,
)
from tpunb.kernel.returned import Delivery, Returned
from tpunb.machine import auto_stop, doctor, environment, machine, metadata, tpu
from tpunb.machine.auto_stop import AutoStop, StopOrder, TpuVm
from tpunb.machine.machine import Machine
from tpunb.machine.metadata import Metadata
from tpunb.notebook.capture.history import History
from tpunb.notebook.errors import NotebookNotFoundError
from tpunb.notebook.files import cell_magics
from tpunb.notebook.models import LaunchCall
from tpunb.runs import directory, last_run, listing, returns, state, tensorboard, upload
from tpunb.runs.cell_times import with_last_times
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note
from tpunb.runs.result import RunError, RunResult
from tpunb.runs.spec import Device, StopCause, StopOrigin
from tpunb.utils import env_vars, files
from tpunb.utils.errors import HandoffError, TpunbError
from tpunb.utils.text import parse_ranks
from tpunb.xla.spmd import VARIABLE

if TYPE_CHECKING:
    from tpunb.kernel.pipeline import RunRequest
    from tpunb.notebook.lint.findings import Finding
    from tpunb.notebook.models import Snapshot
    from tpunb.places.target import Target

LAST_UPLOAD = 600.0
"""Seconds that a cell waits until its run is in the bucket, where the machine may end with it."""


@dataclass
class Defaults:
    """What `%tpu_setup` has chosen for later cells."""

    runs: Path = field(default_factory=listing.default_folder)
    """Where run folders go."""
    cores: int | None = None
    """Ranks of runs that do not say how many; None: what the machine has."""
    notebook: str | None = None
    """The notebook's file; None: it is looked for."""


@dataclass
class Interrupts:
    """How often the interrupt key was pressed."""

    count: int = 0


@contextmanager
def counted_interrupts() -> Iterator[Interrupts]:
    """Count presses of the interrupt key instead of raising in the middle of something.

    In the middle of an import as well, of which nbconvert brings many.

    Signal handlers belong to the main thread; a cell that runs elsewhere goes without.
    """
    interrupts = Interrupts()

    def count(number: int, frame: object) -> None:
        interrupts.count += 1

    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, count)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


class LaunchInterrupt(KeyboardInterrupt):
    """The interrupt key was pressed during `tpunb.launch`: `error` says what became of the run.

    A KeyboardInterrupt, because it has to leave loops that catch the errors of their runs.
    """

    def __init__(self, error: TpunbError) -> None:
        super().__init__(str(error))
        self.error = error

    def _render_traceback_(self) -> list[str]:
        return self.error._render_traceback_()


class Session:
    """What the magics of one kernel share."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.history = History(shell)
        self.launcher = Launcher()
        self.returned = Returned()
        self.defaults = Defaults()
        self._metadata: Metadata | None = None
        self._lint_told: object = None
        self._notes_told: set[str] = set()
        device.watch_device(shell)
        if tpu.on_the_bus(machine.root_of(os.environ))[0] and (change := self.choose_device()):
            print(f"{change} (`%tpu_setup --kernel tpu` changes that)")
        self.auto_stop = AutoStop()
        shell.events.register("pre_run_cell", self.auto_stop.begin_cell)
        shell.events.register("post_run_cell", self.auto_stop.end_cell)
        self._ahead = False
        shell.events.register("post_run_cell", self._run_ahead)

    def close(self) -> None:
        """Leave the kernel as it was: no hook, no process."""
        self.shell.events.unregister("pre_run_cell", self.auto_stop.begin_cell)
        self.shell.events.unregister("post_run_cell", self.auto_stop.end_cell)
        self.shell.events.unregister("post_run_cell", self._run_ahead)
        self.auto_stop.close()
        device.unwatch_device(self.shell)
        self.history.close()
        self.launcher.close()

    # The machine and its environment

    def environ(self) -> dict[str, str]:
        """The kernel's environment, without what tpunb itself has put there."""
        env = dict(os.environ)
        if not self._user_chose_device() or device.cell_asks_for_missing_tpu():
            env.pop("PJRT_DEVICE", None)
        if debug.switched_spmd_on():
            env.pop(VARIABLE, None)
        if not tensorboard.SET_BEFORE:  # a thread may be importing tensorboardX now
            env.pop(tensorboard.SET_BY_IMPORT, None)
        return env

    def _user_chose_device(self) -> bool:
        return device.user_set_pjrt_device(cell.source for cell in self.history.executions())

    def choose_device(self, wanted: Device | None = None) -> str | None:
        """Choose the kernel's own XLA device; what to tell the user (`device.choose_device`)."""
        return device.choose_device(wanted, set_by_user=self._user_chose_device())

    def machine(self, requested: Mapping[str, str] | None = None) -> Machine:
        """This machine; its device is the one that `--env` asks for.

        Its metadata server is asked once: what it says stays as it is.
        """
        env = self.environ()
        if requested and "PJRT_DEVICE" in requested:
            env["PJRT_DEVICE"] = requested["PJRT_DEVICE"]
        if self._metadata is None:
            self._metadata = metadata.read_all(env, machine.root_of(env), metadata.PATIENT)
        return machine.machine_from_metadata(env, machine.root_of(env), self._metadata)

    def _run_environment(
        self, here: Machine, requested: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """The environment of a run on this machine, with what `--env` asks for."""
        return environment.run_environment(self.environ(), here.device, requested, here)

    # %tpu_setup

    def setup(self, options: SetupOptions) -> None:
        """`%tpu_setup`: choose defaults, preload, show the environment, order a shutdown."""
        self._choose_defaults(options)
        if not options.no_warm and not setup.missing_xla():
            self.launcher.warm(self._run_environment(self.machine()))
            # nbconvert takes two seconds to import; by the first train cell it is there.
            threading.Thread(target=preload, name="tpunb-warm-up", daemon=True).start()
        self._show_environment(options)
        self._ahead = options.ahead
        if options.keep_running:
            print(auto_stop.keep_running())
        elif (vm := self._vm_to_stop(options, "%tpu_setup")) is not None:
            self._order_stop(vm, options.idle)

    def _choose_defaults(self, options: SetupOptions) -> None:
        here = self.machine()
        if options.cores is not None:
            self.defaults.cores = _checked(here, options.cores, "%tpu_setup --cores")
        if options.kernel_device == "TPU" and not here.chips:
            raise UsageError("%tpu_setup --kernel tpu: this machine has no TPU")
        change = self.choose_device(options.kernel_device)
        if change and options.kernel and not options.json:
            print(change)
        if options.notebook is not None:
            # Looked at now: what is wrong with it shows here, and a later %cd changes nothing.
            path = Path(options.notebook).expanduser().absolute()
            if not path.is_file():
                raise NotebookNotFoundError(str(path), "%tpu_setup --notebook")
            self.defaults.notebook = str(path)
        if options.runs is not None:
            self.defaults.runs = listing.choose_folder(options.runs)

    def _show_environment(self, options: SetupOptions) -> None:
        """A card, or everything as JSON. Raises where nothing can run."""
        here = self.machine()  # which has asked the metadata server
        preload = ""
        if not options.no_warm:
            preload = setup.PRELOADED if self.launcher.is_warm else setup.PRELOADING
        setup.show_report(
            doctor.inspect_machine(
                self.environ(),
                runs=self.defaults.runs,
                cores=self.defaults.cores,
                answers=here.metadata,
                imported=sys.modules,
            ),
            preload=preload,
            json=options.json,
            preloaded=lambda: self.launcher.is_warm,
        )
        if not options.no_warm:
            setup.require_xla("training")

    def _vm_to_stop(self, options: SetupOptions | TrainOptions, magic: str) -> TpuVm | None:
        """The machine, if it is to be stopped; asked for and refused before anything begins."""
        if options.idle is not None and not options.stop_when_done:
            raise UsageError(f"{magic} --idle needs --stop-when-done")
        return auto_stop.find_tpu_vm(self.environ()) if options.stop_when_done else None

    def _order_stop(self, vm: TpuVm, idle: float | None, run: Path | None = None) -> None:
        runs, now = str(self.defaults.runs), time.time()
        order = StopOrder(vm, runs, now, str(run) if run else None, idle, auto_stop.COUNTDOWN)
        front = front_end.current_front_end()
        publish = front.publish

        def show(line: str) -> None:
            if publish is None:
                front.write(line + "\n")
            else:
                publish({"text/plain": line})

        self.auto_stop.order(order, show, live=publish is not None)

    def _run_ahead(self, result: ExecutionResult | None) -> None:
        """`%tpu_setup --ahead`: what has run here runs where later runs begin.

        What cannot be converted is not said now: the train cell will.
        """
        if not self._ahead or result is None or not result.success or not self.launcher.is_warm:
            return
        info = result.info
        if info is None or not info.store_history or "tpu_train" in cell_magics(info.raw_cell):
            return
        with suppress(TpunbError, UsageError):
            request = self.prepare(TrainOptions(), "pass")
            if request.spmd is None and request.notebook.replicate is None:
                script = request.notebook.script
                spec = request.spec("ahead")
                self.launcher.run_ahead(spec, script, request.env, request.restored)

    # %%tpu_train

    def train(self, options: TrainOptions, cell: str) -> RunResult | BackgroundRun | None:
        """`%%tpu_train`: from the options and the cell's body to the result."""
        if env_vars.SWEEP in os.environ:  # a trial is over when its runs are
            options = replace(options, detach=False)
        with counted_interrupts() as interrupts:
            front = front_end.current_front_end()
            request = self.prepare(options, cell, interrupts, front)
            if options.dry_run:
                print(_describe(request))
                return None
            run = self.start(request, interrupts)
            delivery = self.returned.add(
                Delivery(
                    self.history.running(),
                    run.dir,
                    options.returns,
                    options.out,
                    background=options.background,
                    detached=options.detach,
                    raises=not options.no_raise,
                )
            )
            if options.detach:
                self.leave(run)
                return None
            if isinstance(run, Run) and options.background:
                return self.hand_over_later(run, request, delivery)
            stop = html.LEAVE if isinstance(run, Attached) else html.STOP
            view = RunView(run.spec, run.dir, logs=request.shown_ranks, front=front, stop=stop)
            result = self.follow(run, view, request, interrupts)
            if result is None:
                delivery.detached = True
                return None
            return self.hand_over(result, options, delivery, told=view.tells_all)

    def launch(self, options: LaunchOptions, call: LaunchCall) -> RunResult:
        """`tpunb.launch`: the same for a call in a plain cell.

        Raises LaunchInterrupt if the interrupt key was pressed, however the run has ended.
        """
        with counted_interrupts() as interrupts:
            try:
                front = front_end.current_front_end()
                request = self.prepare(options, call, interrupts, front)
                run = self.start(request, interrupts)
                assert isinstance(run, Run)
                view = RunView(run.spec, run.dir, logs=request.shown_ranks, front=front)
                result = self.follow(run, view, request, interrupts)
                assert result is not None
                self.returned.add_launched(result)
                self.hand_over(result, options, None, told=view.tells_all)
            except TpunbError as error:
                if interrupts.count:
                    raise LaunchInterrupt(error) from None
                raise
            if interrupts.count:
                raise LaunchInterrupt(TpunbError(f"interrupted when run {run.dir.id} had ended"))
            return result

    def prepare(
        self,
        options: TrainOptions,
        cell: str | LaunchCall,
        interrupts: Interrupts | None = None,
        front: FrontEnd | None = None,
        parameters: Mapping[str, object] = MappingProxyType({}),
    ) -> RunRequest:
        """Decide everything about a run, and check what can be checked before it starts.

        `front` shows what it waits for while hosts elsewhere are asked; an interrupt gives up on
        them. `parameters`: values of a trial of `--grid`.

        Raises UsageError, and TpunbError for a notebook or a machine that cannot run it.
        """
        if options.detach and options.out is not None:
            raise UsageError(
                "%%tpu_train --out: a detached run has no result yet; "
                "`%tpu_attach --out VAR` assigns it at its end"
            )
        try:
            os.getcwd()
        except FileNotFoundError:
            raise TpunbError(
                "the working directory of this notebook's kernel was removed, and a run works in "
                "it: change to another one with `%cd FOLDER`"
            ) from None
        if options.on is None and (place := os.environ.get(env_vars.ON)):
            options = replace(options, on=place)
        requested, target = dict(options.env), None
        here = self.machine(requested)
        if options.on is not None:
            target = self._find_target(options, interrupts or Interrupts(), front)
            here = target.machine(here)
        if (refusal := environment.refused_variables(requested, here)) is not None:
            raise UsageError(f"{options.written('env')} {refusal}")
        cores = self._choose_cores(here, options, target)
        _ranks_to_show(
            options.ranks, cores, options.written("ranks")
        )  # what is wrong in any run is said at once
        kernel = self.environ() if target is None else {}
        env = self._run_environment(here, requested) if target is None else dict(requested)
        vm = None
        if not options.dry_run and target is None:
            vm = self._vm_to_stop(options, "%%tpu_train")
            self._ready_machine(options, here)
            self.launcher.warm(env)  # it imports while the notebook is converted
        # They are much, and `%load_ext` must feel instant.
        from tpunb.kernel import pipeline
        from tpunb.notebook.convert import assigned

        notebook = pipeline.prepare_notebook(
            self.history,
            cell,
            notebook=self.defaults.notebook,
            user_ns=self.shell.user_ns,
            returned=self.returned,
            replicate=options.replicate,
            replay=options.replay,
            parameters=parameters,
        )
        held = {name.name for name in notebook.values.names} if notebook.values else set()
        if refusal := assigned.refusal(notebook.script, options.returns, held):
            raise UsageError(f"{options.written('returns')} {refusal}")
        changes: tuple[environment.Change, ...] = ()
        if target is None:
            changes = tuple(environment.environment_changes(kernel, here.device, here))
        hosts = 1 if target is None else len(target.hosts)
        spmd = environment.spmd_environment(
            kernel, requested, here, cores // hosts, notebook.script.spmd
        )
        if spmd is not None:
            env, cores, changes = dict(spmd.env), spmd.cores * hosts, spmd.changes
        resumed = None
        if options.resume is not None:
            env[env_vars.RESUME], resumed = self._checkpoints(
                options.resume, notebook.snapshot, target
            )
        return pipeline.RunRequest(
            options=options,
            notebook=notebook,
            machine=here,
            cores=cores,
            spmd=spmd,
            env=env,
            changes=changes,
            shown_ranks=_ranks_to_show(
                options.ranks, cores if spmd is None else hosts, options.written("ranks")
            ),
            vm=vm,
            lacks_tpu=target is None and device.cell_asks_for_missing_tpu(),
            notes_told=frozenset(self._notes_told),
            lint_told=_without_places(notebook.findings) == self._lint_told,
            resumed_from=resumed,
            call=cell if isinstance(cell, LaunchCall) else None,
            target=target,
        )

    def _find_target(
        self, options: TrainOptions, interrupts: Interrupts, front: FrontEnd | None
    ) -> Target:
        """The place that `--on` names, once it was asked whether it can take a run."""
        assert options.on is not None
        if options.stop_when_done:
            raise UsageError(f"{options.written('on')}: --stop-when-done stops this machine only")
        from tpunb.places.kinds import find_target

        front = front or front_end.current_front_end()
        show = partial(show_waiting, front)
        try:
            target = find_target(options.on, Path.cwd(), show, lambda: interrupts.count > 0)
            cost.refuse_options(target, options)
            if not options.dry_run and (told := cost.describe(target, options)):
                show("; ".join(told))
            return target
        except BaseException:
            if front.publish is not None:  # the error says it all
                front.publish({"text/html": "", "text/plain": ""})
            raise

    def _choose_cores(
        self, here: Machine, options: TrainOptions, target: Target | None = None
    ) -> int:
        if target is not None:
            try:
                return target.choose_cores(options.cores)
            except ValueError as error:
                raise UsageError(f"{options.written('cores')}: {error}") from None
        forced = os.environ.get(env_vars.CORES)
        if forced is not None:
            return _checked(here, "all" if forced == "all" else int(forced), "tpunb run --cores")
        written = options.written("cores")
        if options.cores is None:
            return self.defaults.cores or _checked(here, "all", written)
        return _checked(here, options.cores, written)

    def _checkpoints(
        self, resume: str, notebook: Snapshot, target: Target | None = None
    ) -> tuple[str, str]:
        """`--resume`: a run's checkpoints and its id, or the folder or URL of some, twice."""
        if "://" in resume:
            return resume, resume
        if Path(resume).is_dir() or (target is not None and resume.startswith("/")):
            return (str(Path(resume).absolute()),) * 2
        if resume == LAST:
            run = _latest_saved(self.defaults.runs, notebook)
        else:
            run = directory.find_run(self.defaults.runs, resume)
        if target is not None:
            return target.resume(run), run.id
        if not run.checkpoints.is_dir():
            raise TpunbError(
                f"run {run.id} has no checkpoint to continue from: "
                "`tpunb.save(state, step)` in its train cell writes them"
            )
        return str(run.checkpoints), run.id

    def _ready_machine(self, options: TrainOptions, here: Machine) -> None:
        """What must be right before a run may start; `--cold` ends the preloaded process."""
        setup.require_xla(options.caller)
        if here.device == "TPU":
            setup.require_free_tpu(self.environ())
        if options.cold:
            self.launcher.retire()

    def start(self, request: RunRequest, interrupts: Interrupts) -> Run | Attached:
        """Make the run folder, start the run, and order a shutdown after it if asked to.

        Raises LintError for what would surely fail, HandoffError for arguments that cannot be
        pickled, and TpunbError after an interrupt: nothing was started then.
        """
        from tpunb.notebook.convert import kept

        request.raise_for_lint()
        if interrupts.count:
            raise TpunbError("interrupted before the run began: nothing was started")
        if request.target is not None:
            cost.confirm(request.target, request.options, cost.ask_in_kernel)
        # Cells get new numbers whenever they run.
        self._lint_told = _without_places(request.notebook.findings)
        snapshot = request.notebook.snapshot
        if snapshot.path is None:  # it will be no other way with the next run
            self._notes_told.update(snapshot.notes)
        with directory.new_run(self.defaults.runs, request.name) as folder:
            if request.call is not None:
                _save_arguments(request.call, folder)
            spec = request.spec(folder.id)
            blocks = with_last_times(spec.blocks, request.notebook.script.text, folder)
            spec = replace(spec, blocks=blocks)
            if request.notebook.values is not None:
                files.write_json(folder.kernel_values, request.notebook.values.to_json())
            script, kept_cells = request.notebook.script, kept.kept_snapshot(snapshot)
            if request.target is not None:
                with suppress(OSError):  # it does without
                    _keep_notebook(snapshot, folder)
                run: Run | Attached = self.launcher.start_at(
                    request.target,
                    folder,
                    spec,
                    script,
                    kept_cells,
                    request.remote_env(folder.id),
                    detached=request.options.detach,
                )
            else:
                run = self.launcher.start(
                    folder,
                    spec,
                    script,
                    kept_cells,
                    request.env,
                    restored=request.restored,
                    detached=request.options.detach,
                )
        if (bucket := listing.bucket()) is not None:
            with suppress(OSError):  # no memory for it: the folder here has everything
                upload.start_upload(folder, bucket)
        if request.vm is not None:
            self._order_stop(request.vm, request.options.idle, folder.path)
        with suppress(OSError):  # the run has begun, and does without
            _keep_notebook(snapshot, folder)
        if env_vars.RAN in os.environ:
            files.append_text(Path(os.environ[env_vars.RAN]), f"{folder.path}\n")
        return run

    def leave(self, run: Run | Attached) -> None:
        """Say how to come back to a detached run."""
        name, runs = run.spec.id, shlex.quote(str(run.dir.path.parent))
        if cannot := _why_unstoppable(run.dir):
            print(
                f"run {name} continues without this notebook, on {run.spec.cores()}\n"
                f"  follow it, and get its result: %tpu_attach {name}\n"
                f"  in a terminal: tpunb attach {name} --runs {runs}\n"
                f"  {cannot}"
            )
            return
        print(
            f"run {name} continues without this notebook, on {run.spec.cores()}\n"
            f"  follow it, and get its result: %tpu_attach {name}\n"
            f"  stop it: %tpu_stop {name}\n"
            f"  in a terminal: tpunb logs --follow {name} --runs {runs}\n"
            f"                 tpunb stop {name} --runs {runs}"
        )

    def hand_over_later(self, run: Run, request: RunRequest, delivery: Delivery) -> BackgroundRun:
        """The handle of a run in the background."""
        script, options = request.notebook.script, request.options

        def bind(result: RunResult) -> None:
            self.shell.user_ns.update(result.returns)
            delivery.bind(result)

        handle = BackgroundRun(
            run,
            logs=request.shown_ranks,
            notes=(*cost.describe(request.target, options), *request.notes(run.spec)),
            raises=not options.no_raise,
            bind=bind,
            ended=lambda result: self.launcher.remember(script, result, run.spec),
        )
        if options.out is not None:
            self.shell.user_ns[options.out] = handle
        return handle

    def follow(
        self, run: Run | Attached, view: RunView, request: RunRequest, interrupts: Interrupts
    ) -> RunResult | None:
        """Show the run until it has ended. The interrupt key stops it, twice at once.

        What cannot be stopped says so, and is left at the second time: None.
        """
        for note in (
            *cost.describe(request.target, request.options),
            *request.notes(run.spec),
        ):
            view.show(Note(note))
        seen = 0
        for _ in panel.show_run(run, view):
            if interrupts.count > seen:
                hurry, seen = seen > 0, interrupts.count
                if hurry and isinstance(run, Attached):
                    view.leave("still running; this cell stopped following it")
                    self.leave(run)
                    return None
                run.stop(
                    StopCause.USER,
                    "interrupted in the notebook",
                    origin=StopOrigin.NOTEBOOK,
                    now=hurry,
                )
        result = _finish(run, view)
        if listing.bucket() is not None and front_end.current_front_end().batch:
            count = interrupts.count
            left = upload.wait_for_upload(run.dir, LAST_UPLOAD, lambda: interrupts.count > count)
            if left:
                print(left)
        self.launcher.remember(request.notebook.script, result, run.spec)
        return result

    def hand_over(
        self,
        result: RunResult,
        options: TrainOptions | AttachOptions,
        delivery: Delivery | None,
        *,
        told: bool,
    ) -> RunResult:
        """Bind what the run returned; raise its error if it failed.

        `delivery`: None for a call, whose caller binds what it gets; `told`: a card shows
        everything already.
        """
        if delivery is not None:
            self.shell.user_ns.update(result.returns)
            delivery.bind(result)
        if options.out is not None:
            self.shell.user_ns[options.out] = result
        last_run.result = result
        if not options.no_raise:
            try:
                result.raise_for_failure()
            except RunError as error:
                error.told = told
                raise
        return result

    # Runs that somebody else has started

    def attach(self, options: AttachOptions) -> RunResult | None:
        """`%tpu_attach`: everything from the run's start, then until its end, or an interrupt."""
        folder = state.find_active(self.defaults.runs, options.run)
        _see_elsewhere(folder)
        run = Attached(folder)
        shown_ranks = _ranks_to_show(options.ranks, run.spec.world_size, "%tpu_attach --ranks")
        age = max(0.0, time.time() - run.dir.spec.stat().st_mtime)
        view = RunView(run.spec, run.dir, logs=shown_ranks, age=age, stop=html.LEAVE)
        with counted_interrupts() as interrupts:
            for _ in panel.show_run(run, view):
                if interrupts.count:
                    view.leave("still running; this cell stopped following it")
                    stop = _why_unstoppable(run.dir) or f"%tpu_stop {run.dir.id} stops it"
                    print(f"run {run.dir.id} is still running; {stop}")
                    return None
            result = _finish(run, view)
        delivery = self.returned.add(
            Delivery(self.history.running(), run.dir, run.spec.returns, options.out)
        )
        return self.hand_over(result, options, delivery, told=view.tells_all)

    def stop(self, wanted: str | None) -> None:
        """`%tpu_stop`: ask, and wait until the run has ended."""
        run = state.find_active(self.defaults.runs, wanted)
        _refuse_stop(run)
        _see_elsewhere(run)
        for line in state.stop_run(run, "stopped with %tpu_stop", StopOrigin.MAGIC):
            print(line, flush=True)


def _see_elsewhere(run: RunDir) -> None:
    """Have a run that goes on elsewhere followed into its folder here, if nobody does."""
    from tpunb.places import mirror

    mirror.ensure(run)


def _why_unstoppable(run: RunDir) -> str:
    """Why a run cannot be stopped from here, and what can be done; '' if it can be."""
    from tpunb.places import kinds

    return kinds.why_unstoppable(run)


def _refuse_stop(run: RunDir) -> None:
    """Raise TpunbError for an active run that cannot be stopped from here."""
    from tpunb.places import kinds

    kinds.refuse_stop(run)


def _without_places(findings: Iterable[Finding]) -> object:
    return [(each.rule, each.line, each.source) for each in findings]


def _save_arguments(call: LaunchCall, folder: RunDir) -> None:
    """Write the arguments of a call into the run folder, which is removed if that fails."""
    try:
        if call.arguments:
            calls.save_arguments(call.arguments, folder.arguments)
        files.write_json(folder.plain_arguments, dict(call.plain))
    except HandoffError:
        shutil.rmtree(folder.path)
        raise


def _latest_saved(runs: Path, notebook: Snapshot) -> RunDir:
    """The latest run of a notebook that has saved a checkpoint."""
    for run in reversed(directory.list_runs(runs)):
        saved = any(run.path.glob("attempts/*/*/saving.txt")) and run.checkpoints.is_dir()
        if saved and _notebook_of(run) == notebook.path:
            return run
    raise TpunbError(
        f"--resume {LAST}: no run of this notebook in {runs} has saved a checkpoint; "
        "%tpu_runs lists all runs, and --resume RUN names one"
    )


def _notebook_of(run: RunDir) -> object:
    """The path of the notebook that a run was made from."""
    try:
        return json.loads(run.snapshot.read_text(encoding="utf-8")).get("path")
    except (OSError, ValueError):  # half written, or of something else
        return ...


def _describe(request: RunRequest) -> str:
    from tpunb.kernel import pipeline

    return pipeline.describe_plan(request)


def _finish(run: Run | Attached, view: RunView) -> RunResult:
    """The result of a run that has ended, shown in its card."""
    attached = isinstance(run, Attached)
    result = returns.collect_returns(run.result(), run.spec, attached=attached)
    view.finish(result)
    panel.show_result(result)
    return result


def _ranks_to_show(text: str, world_size: int, option: str) -> frozenset[int]:
    """The ranks that `--ranks` names."""
    try:
        return parse_ranks(text, world_size)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def _checked(here: Machine, requested: Cores, option: str) -> int:
    """A number of cores that this machine can run."""
    cores = here.default_cores if requested == "all" else requested
    problem = here.check_cores(cores)
    if problem is not None:
        raise UsageError(f"{option}: {problem}")
    return cores


def _keep_notebook(snapshot: Snapshot, folder: RunDir) -> None:
    """The whole notebook; `notebook.json` holds what was captured of it.

    As it was found but for secrets (`tpunb.notebook.convert.kept`); nothing of a file that is none.
    """
    from tpunb.notebook.convert.kept import kept_notebook

    content = snapshot.content
    if content is None and snapshot.path is not None and Path(snapshot.path).is_file():
        content = Path(snapshot.path).read_bytes().decode("utf-8", "replace")
    if content is not None:
        with suppress(ValueError):
            text = kept_notebook(content)
            files.atomic_write(folder.path / "notebook.ipynb", text.encode("utf-8", "replace"))


def preload() -> None:
    """Import and read what the first train cell needs of the kernel, also if it fails."""
    importlib.import_module("tpunb.kernel.pipeline")
    importlib.import_module("ipywidgets")
    importlib.import_module("tpunb.notebook.convert.convert").warm_up()
    importlib.import_module("tpunb.diagnostics.failure.rules").rules()
