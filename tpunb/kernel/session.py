"""The session of one kernel: its defaults, and each train cell from its options to its result."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell

from tpunb.backends.choice import LABELS, BackendChoice, find_installed
from tpunb.backends.xla import restored_names
from tpunb.backends.xla.spmd import VARIABLE
from tpunb.diagnostics import cell as debug
from tpunb.display import front_end, html
from tpunb.display.front_end import FrontEnd
from tpunb.display.run_view import RunView, show_waiting
from tpunb.kernel import cost, device, rank_names, setup
from tpunb.kernel.backend_choice import choose_for
from tpunb.kernel.background import BackgroundRun
from tpunb.kernel.launcher import Attached, Run
from tpunb.kernel.options import (
    AttachOptions,
    DebugCellOptions,
    LaunchOptions,
    SetupOptions,
    TrainOptions,
    ranks_to_show,
)
from tpunb.kernel.prepare import check_options, choose_cores
from tpunb.kernel.rank_names import RankNames
from tpunb.kernel.returned import Returned, ReturnedRun
from tpunb.kernel.runs import Runs, find_attached, follow_attached, stop
from tpunb.machine import auto_stop, doctor, environment, machine, metadata, tpu
from tpunb.machine.auto_stop import AutoStop, StopOrder, TpuVm
from tpunb.machine.machine import Machine
from tpunb.machine.metadata import Metadata
from tpunb.notebook.capture.capture import capture
from tpunb.notebook.capture.history import History
from tpunb.notebook.convert.launch_calls import starts_processes
from tpunb.notebook.errors import NotebookError, NotebookNotFoundError
from tpunb.notebook.files import cell_magics
from tpunb.notebook.models import LaunchCall
from tpunb.places.hosts_target import find_hosts
from tpunb.places.target import LocalTarget
from tpunb.runs import callbacks, last_run, listing, tensorboard
from tpunb.runs.callbacks import Callback
from tpunb.runs.directory import RunDir
from tpunb.runs.result import RunError, RunResult
from tpunb.runs.spec import BackendName, Device, Stop, StopOrigin
from tpunb.utils.errors import TpunbError
from tpunb.utils.interrupts import Interrupts, counted_interrupts

if TYPE_CHECKING:
    from tpunb.kernel.pipeline import RunRequest
    from tpunb.places.hosts_target import Target

PAUSE = 5.0
"""How much longer than its start each run of `--ahead` is followed by a pause."""
LONGEST_PAUSE = 1.0
INTERRUPTED = Stop(reason="interrupted in the notebook", origin=StopOrigin.NOTEBOOK)


@dataclass
class Defaults:
    """Defaults for later cells, chosen with `%tpu_setup`."""

    runs: Path = field(default_factory=listing.default_folder)
    """The folder of run folders."""
    cores: int | None = None
    """Ranks of runs without --cores; None: the machine's default."""
    notebook: str | None = None
    """The notebook's file; None: tpunb searches for it."""
    backend: BackendName | None = None
    """The backend of all runs; None: the one that the notebook's code is written for."""


class LaunchInterrupt(KeyboardInterrupt):
    """The interrupt key was pressed during `tpunb.launch`; `error` describes the run's end.

    It is a KeyboardInterrupt so that it also ends loops that catch the errors of their runs.
    """

    def __init__(self, error: TpunbError) -> None:
        super().__init__(str(error))
        self.error = error

    def _render_traceback_(self) -> list[str]:
        return self.error._render_traceback_()


class Session:
    """The state that the magics of one kernel share."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.history = History(shell)
        self.runs = Runs(INTERRUPTED)
        self.returned = Returned()
        self.defaults = Defaults()
        self._metadata: Metadata | None = None
        self._launched: tuple[int | None, RunView | None] = None, None
        """The cell of the last call of `tpunb.launch`, and the view of its run."""
        self._told: set[object] = set()
        device.note_running()
        restored_names.restore()  # cells of 2020 run here first
        chips, _ = tpu.count_chips(machine.root_of(os.environ))
        if chips and find_installed().torch_xla and (change := self.choose_device()):
            print(f"{change} (`%tpu_setup --kernel tpu` changes that)")
        self.auto_stop = AutoStop()
        self._ahead = False
        self._ahead_from = 0.0
        """When the next cell may be run ahead, on the monotonic clock."""
        self._has_tpu_device = False
        self._rehearse_tpu()  # before a cell without "tpu" imports torch, and with it torch_tpu
        self._rank_names = RankNames()
        self._hooks: tuple[tuple[str, Any], ...] = (
            ("pre_run_cell", self.auto_stop.begin_cell),
            ("pre_run_cell", device.defer_interrupts),
            ("pre_run_cell", self._prepare_device),
            ("pre_run_cell", self._name_launcher),
            ("post_run_cell", device.note_cell),
            ("post_run_cell", self.auto_stop.end_cell),
            ("post_run_cell", self._run_ahead),
            ("post_run_cell", self._rank_names.explain),
        )
        for event, hook in self._hooks:
            shell.events.register(event, hook)

    def close(self) -> None:
        """Remove all hooks from the kernel and end all processes."""
        for event, hook in self._hooks:
            self.shell.events.unregister(event, hook)
        self.auto_stop.close()
        self.history.close()
        self.runs.close()

    def _prepare_device(self, info: ExecutionInfo) -> None:
        """Before a cell that names TorchTPU's device: rehearse it in the kernel, too."""
        text = str(info.raw_cell or "")
        if "tpu" in text and "tpu_train" not in cell_magics(text):
            self._rehearse_tpu(text)

    def _name_launcher(self, info: ExecutionInfo) -> None:
        """Before a cell that starts processes from the kernel: print how it trains as a run."""
        text = str(info.raw_cell or "")
        if not {"tpu_train", "tpu_debug"} & {*cell_magics(text)} and (
            launcher := starts_processes(text, (run.source for run in self.history.executions()))
        ):
            print(
                f"{launcher} often hangs or fails in the kernel: with %%tpu_train above it, this "
                "cell runs on every core"
            )

    def _rehearse_tpu(self, cell: str = "") -> None:
        """Rehearse TorchTPU's device in the kernel if runs use it, unless it has the TPU."""
        if self._has_tpu_device:
            return
        choice = self.choose_backend(cell)
        if choice.backend != "torchtpu" or choice.problem(on_tpu=False) is not None:
            return
        self._has_tpu_device = True
        device.rehearse_tpu()

    def _bind(self, values: Mapping[str, object], run: RunDir) -> None:
        """Assign what a run has brought to the notebook's variables."""
        self.shell.user_ns.update(values)

    # The machine and its environment

    def environ(self) -> dict[str, str]:
        """Return the kernel's environment without the variables that tpunb itself has set."""
        env = dict(os.environ)
        if not self._user_chose_device() or device.cell_asks_for_missing_tpu():
            env.pop("PJRT_DEVICE", None)
        for name in device.variables_set_here():
            env.pop(name, None)
        if debug.switched_spmd_on():
            env.pop(VARIABLE, None)
        if not tensorboard.SET_BEFORE:  # a thread may be importing tensorboardX now
            env.pop(tensorboard.SET_BY_IMPORT, None)
        return env

    def _user_chose_device(self) -> bool:
        return device.user_set_pjrt_device(cell.source for cell in self.history.executions())

    def choose_device(self, wanted: Device | None = None) -> str | None:
        """Choose the kernel's own XLA device; return a message about a change, or None."""
        return device.choose_device(wanted, set_by_user=self._user_chose_device())

    def choose_backend(self, cell: str = "") -> BackendChoice:
        """Return the backend of the next run: that of `%tpu_setup --backend`, or of the code.

        `cell`: code of the run besides the cells that were executed.
        """
        deleted = self.history.deleted()
        newest = {
            run.id or run.source: run
            for run in self.history.executions()
            if not run.failed and run.id not in deleted
        }
        cells = [(run.number, run.source) for run in newest.values()]
        own = [text for _, text in cells if "tpu_train" not in cell_magics(text)]
        cells.append((self.history.running(), cell))
        return choose_for(self.defaults.backend, cells, [*own, cell])

    def _choose_ahead(self) -> BackendChoice:
        """As `choose_backend`, also from the cells that have not run yet, if their runs could use
        what they name: a notebook begins with `%tpu_setup`.
        """
        choice = self.choose_backend()
        if self.defaults.backend is not None:
            return choice
        try:
            found = capture(
                self.history, notebook=self.defaults.notebook, user_ns=self.shell.user_ns
            )
        except NotebookError:  # the first run reports it
            return choice
        code = [cell for cell in found.cells if cell.kind == "code"]
        ahead = choose_for(
            None, [(cell.number or at, cell.source) for at, cell in enumerate(code, 1)]
        )
        return ahead if ahead.problem(on_tpu=False) is None else choice

    def backend_of_debug(self, options: DebugCellOptions, cell: str) -> BackendName:
        """Return the backend of a `%%tpu_debug` cell; raise an error if it cannot run.

        The kernel never opens a TPU for it: without torch_xla, the device is rehearsed.
        """
        choice = self.choose_backend(cell)
        choice.require("%%tpu_debug", on_tpu=False)
        if choice.backend != "xla" and options.profile:
            raise UsageError(
                "%%tpu_debug --profile writes a trace of torch_xla, and this notebook uses "
                f"{LABELS[choice.backend]} ({choice.why}): use torch.profiler in the cell, or "
                "%%tpu_train --profile"
            )
        return choice.backend

    def machine(
        self, requested: Mapping[str, str] | None = None, choice: BackendChoice | None = None
    ) -> Machine:
        """Return this machine as a backend sees it, by default that of the next run.

        `requested`: variables of `--env`, which may set the device. The metadata server is queried
        once; its answers do not change.
        """
        env = self.environ()
        if requested and "PJRT_DEVICE" in requested:
            env["PJRT_DEVICE"] = requested["PJRT_DEVICE"]
        if self._metadata is None:
            self._metadata = metadata.read_all(env, machine.root_of(env), metadata.PATIENCE)
        here = machine.machine_from_metadata(env, machine.root_of(env), self._metadata)
        choice = choice or self.choose_backend()
        return here.with_backend(choice.backend, cpu=choice.cpu)

    def _run_environment(
        self, here: Machine, requested: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Return the environment of a run on this machine, with the variables of `--env`."""
        return environment.run_environment(
            self.environ(), here.device, requested, here, here.backend
        )

    # %tpu_setup

    def setup(self, options: SetupOptions) -> None:
        """`%tpu_setup`: choose defaults, preload, show the environment, order a shutdown."""
        self._choose_defaults(options)
        choice = self._choose_ahead()
        here = self.machine(choice=choice)
        if not options.no_warm and not choice.problem(on_tpu=here.device == "TPU"):
            self.runs.launcher.warm(self._run_environment(here))
            # Importing nbconvert takes two seconds: done now, the first train cell need not wait.
            threading.Thread(target=preload, name="tpunb-warm-up", daemon=True).start()
        self._show_environment(options, here, choice)
        self._ahead = options.ahead
        if options.keep_running:
            print(auto_stop.keep_running())
        elif (vm := self._vm_to_stop(options, "%tpu_setup")) is not None:
            self._order_stop(vm, options.idle)

    def _choose_defaults(self, options: SetupOptions) -> None:
        if options.backend is not None:
            auto = options.backend == "auto"
            self.defaults.backend = None if auto else cast(BackendName, options.backend)
        here = self.machine()
        if options.cores is not None:
            self.defaults.cores = choose_cores(
                LocalTarget(here), options.cores, "%tpu_setup --cores"
            )
        if options.kernel_device == "TPU" and not here.chips:
            raise UsageError("%tpu_setup --kernel tpu: this machine has no TPU")
        if options.kernel_device == "TPU":
            self._has_tpu_device = True
            device.leave_tpu_alone()
        self._rehearse_tpu()
        change = self.choose_device(options.kernel_device)
        if change and options.kernel and not options.json:
            print(change)
        if options.notebook is not None:
            # Checked now, so that an error appears in this cell; absolute, so that %cd is harmless.
            path = Path(options.notebook).expanduser().absolute()
            if not path.is_file():
                raise NotebookNotFoundError(str(path), "%tpu_setup --notebook")
            self.defaults.notebook = str(path)
        if options.runs is not None:
            self.defaults.runs = listing.choose_folder(options.runs)

    def _show_environment(
        self, options: SetupOptions, here: Machine, choice: BackendChoice
    ) -> None:
        """Show a card, or everything as JSON. Raises an error if no run is possible."""
        preload = ""
        if not options.no_warm:
            preload = setup.PRELOADED if self.runs.launcher.is_warm else setup.PRELOADING
        setup.show_report(
            doctor.inspect_machine(
                self.environ(),
                runs=self.defaults.runs,
                cores=self.defaults.cores,
                answers=here.metadata,
                imported=sys.modules,
                backend=choice.backend,
                why=choice.why,
                cpu=choice.cpu,
            ),
            preload=preload,
            json=options.json,
            preloaded=lambda: self.runs.launcher.is_warm,
        )
        if not options.no_warm:
            choice.require("training", on_tpu=here.device == "TPU")

    def _vm_to_stop(self, options: SetupOptions | TrainOptions, magic: str) -> TpuVm | None:
        """Return the machine if it must be stopped afterwards; raise an error if it cannot be."""
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
        """`%tpu_setup --ahead`: run the cell that the kernel has just run in the prelude as well.

        The whole notebook is looked at, so short cells one after the other are run with the last
        of them: a pause follows each start, and what it leaves out takes no longer than the pause.
        Errors of conversion are ignored: the train cell will report them.
        """
        began = time.monotonic()
        if not self._ahead or began < self._ahead_from or not self.runs.launcher.is_warm:
            return
        if result is None or not result.success:
            return
        info = result.info
        if info is None or not info.store_history or "tpu_train" in cell_magics(info.raw_cell):
            return
        with suppress(TpunbError, UsageError):
            request = self.prepare(TrainOptions(), "pass")
            if request.spmd is None and request.notebook.replicate is None:
                script = request.notebook.script
                spec = request.spec("ahead")
                self.runs.launcher.run_ahead(spec, script, request.env, request.restored)
        now = time.monotonic()
        self._ahead_from = now + min(PAUSE * (now - began), LONGEST_PAUSE)

    # %%tpu_train

    def train(self, options: TrainOptions, cell: str) -> RunResult | BackgroundRun | None:
        """`%%tpu_train`: run the cell's body as a train cell and return the result."""
        with counted_interrupts() as interrupts:
            front = front_end.current_front_end()
            request = self.prepare(options, cell, interrupts, front)
            if options.dry_run:
                print(_describe(request))
                return None
            run = self._start(request, interrupts)
            self._rank_names.note_run(request.notebook, _brought(options))
            delivery = self.returned.add(
                ReturnedRun(
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
            assert isinstance(run, Run)
            if options.background:
                return self.hand_over_later(run, request, delivery)
            notes = request.notes(run.spec)
            view = RunView(run.spec, run.dir, logs=request.shown_ranks, front=front, notes=notes)
            brought = _brought(options)

            def missing() -> Iterator[str]:
                return rank_names.missing_below(request.notebook, brought, self.shell.user_ns)

            result = self.runs.follow(run, view, request, interrupts, missing)
            return self.hand_over(result, options, delivery, told=view.shows_everything)

    def launch(
        self, options: LaunchOptions, call: LaunchCall, on_log: Callback | None = None
    ) -> RunResult:
        """`tpunb.launch`: the same as `train` for a call in a plain cell.

        Raises LaunchInterrupt if the interrupt key was pressed, even if the run has succeeded, and
        what `on_log` raised, after the run has stopped.
        """
        raised: list[Exception] = []

        def watched(values: dict[str, float], step: int | None) -> None:
            assert on_log is not None
            if not raised:
                try:
                    on_log(values, step)
                except Exception as error:  # anything, as optuna.TrialPruned: it is the call's
                    raised.append(error)
                    run.stop(Stop(reason=f"on_log raised {type(error).__name__}"))

        with counted_interrupts() as interrupts:
            try:
                front = front_end.current_front_end()
                request = self.prepare(options, call, interrupts, front)
                run = self._start(request, interrupts)
                assert isinstance(run, Run)
                cell, earlier = self._launched
                view = RunView(
                    run.spec,
                    run.dir,
                    logs=request.shown_ranks,
                    front=front,
                    notes=request.notes(run.spec),
                    follows=earlier if cell == self.history.running() else None,
                )
                with callbacks.calling(on_log and watched):
                    result = self.runs.follow(run, view, request, interrupts)
                self._launched = self.history.running(), view
                self.returned.add_launched(result)
                if raised:
                    last_run.result = result
                    raise raised[0]
                self.hand_over(result, options, None, told=view.shows_everything)
            except TpunbError as error:
                if interrupts.count:
                    raise LaunchInterrupt(error) from None
                raise
            if interrupts.count:
                raise LaunchInterrupt(TpunbError(f"interrupted; run {run.dir.id} has ended"))
            return result

    def prepare(
        self,
        options: TrainOptions,
        cell: str | LaunchCall,
        interrupts: Interrupts | None = None,
        front: FrontEnd | None = None,
    ) -> RunRequest:
        """Decide everything about a run, and check what can be checked before it starts.

        `front` shows the progress while the hosts of a place are checked; an interrupt cancels
        the check.

        Raises UsageError, and TpunbError for a notebook or a machine that cannot run the cell.
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
                "the working directory of this notebook's kernel, which runs use too, was "
                "deleted: change to another one with `%cd FOLDER`"
            ) from None
        choice = self.choose_backend(cell if isinstance(cell, str) else "")
        here = self.machine(dict(options.env), choice)
        if options.on is None:
            target: Target = self._local_target(here)
        else:
            target = self._find_place(options.on, options, interrupts or Interrupts(), front)
        vm = None if options.dry_run else self._vm_to_stop(options, "%%tpu_train")
        machine, cores = check_options(options, target, here)
        if options.on is None and not options.dry_run:
            self._ready_machine(options, here, choice)
            # This imports torch_xla while the notebook is converted.
            self.runs.launcher.warm(self._run_environment(here, dict(options.env)))
        from tpunb.kernel import pipeline  # late: it is large, and `%load_ext` must be fast

        notebook = pipeline.prepare_notebook(
            self.history,
            cell,
            notebook=self.defaults.notebook,
            user_ns=self.shell.user_ns,
            returned=self.returned,
            replicate=options.replicate,
            replay=options.replay,
            backend=choice.backend,
            ranks=cores,
        )
        return replace(
            pipeline.make_request(
                options, notebook, machine, cores, runs=self.defaults.runs, target=target
            ),
            vm=vm,
            told=self._told,
            choice=None if choice.backend == "xla" else choice,
            call=cell if isinstance(cell, LaunchCall) else None,
        )

    def _local_target(self, here: Machine) -> LocalTarget:
        remarks: tuple[str, ...] = ()
        if device.cell_asks_for_missing_tpu():
            remarks = (
                "PJRT_DEVICE=TPU is ignored: this machine has no TPU, so this is a CPU rehearsal",
            )
        return LocalTarget(here, self.environ(), self.defaults.cores, remarks)

    def _find_place(
        self, name: str, options: TrainOptions, interrupts: Interrupts, front: FrontEnd | None
    ) -> Target:
        """Return the place that `--on` names, after checking that it can run the cell."""
        if options.stop_when_done:
            raise UsageError(f"{options.written('on')}: --stop-when-done stops this machine only")
        front = front or front_end.current_front_end()
        show = partial(show_waiting, front)
        try:
            target = find_hosts(name, Path.cwd(), show, lambda: interrupts.count > 0)
            if not options.dry_run and (costs := cost.describe(target, options.timeout)):
                show(costs)
            return target
        except BaseException:
            if front.publish is not None:  # the error replaces the progress
                front.publish({"text/html": "", "text/plain": ""})
            raise

    def _ready_machine(self, options: TrainOptions, here: Machine, choice: BackendChoice) -> None:
        """Raise an error unless this machine is ready for a run; with `--cold`, end the preloaded
        process.
        """
        choice.require(options.caller, on_tpu=here.device == "TPU")
        if here.device == "TPU":
            setup.require_free_tpu(self.environ())
        if options.cold:
            self.runs.launcher.retire()

    def _start(self, request: RunRequest, interrupts: Interrupts) -> Run | Attached:
        """Start the run, and order a shutdown after it if requested. Raises as `Runs.start`."""
        run = self.runs.start(request, self.defaults.runs, interrupts, cost.ask)
        if request.vm is not None:
            self._order_stop(request.vm, request.options.idle, run.dir.path)
        return run

    def leave(self, run: Run | Attached) -> None:
        """Print how to follow and stop a detached run."""
        name, runs = run.spec.id, shlex.quote(str(run.dir.path.parent))
        print(
            f"run {name} continues without this notebook, on {run.spec.cores()}\n"
            f"  follow it and get its result: %tpu_attach {name}\n"
            f"  stop it: %tpu_stop {name}\n"
            f"  in a terminal: tpunb logs --follow {name} --runs {runs}\n"
            f"                 tpunb stop {name} --runs {runs}"
        )

    def hand_over_later(
        self, run: Run, request: RunRequest, delivery: ReturnedRun
    ) -> BackgroundRun:
        """Return the handle of a background run; `--out` assigns it too."""
        script, options = request.notebook.script, request.options

        def bind(result: RunResult) -> None:
            self._bind(result.returns, run.dir)
            delivery.bind(result)

        handle = BackgroundRun(
            run,
            logs=request.shown_ranks,
            notes=request.notes(run.spec),
            raises=not options.no_raise,
            bind=bind,
            ended=lambda result: self.runs.launcher.remember(script, result, run.spec),
        )
        if options.out is not None:
            self._bind({options.out: handle}, run.dir)
        return handle

    def hand_over(
        self,
        result: RunResult,
        options: TrainOptions | AttachOptions,
        delivery: ReturnedRun | None,
        *,
        told: bool,
    ) -> RunResult:
        """Assign the run's values and result to the notebook's variables; raise the run's error.

        `delivery`: None for a call, whose caller assigns the value; `told`: a card already shows
        the error.
        """
        if delivery is not None:
            self._bind(result.returns, delivery.run)
            delivery.bind(result)
        if options.out is not None:
            self._bind({options.out: result}, RunDir(result.dir))
        last_run.result = result
        if not options.no_raise:
            try:
                result.raise_for_failure()
            except RunError as error:
                error.told = told
                raise
        return result

    def attach(self, options: AttachOptions) -> RunResult | None:
        """`%tpu_attach`: follow a run from its first line to its end, or until an interrupt."""
        run = find_attached(self.defaults.runs, options.run)
        shown_ranks = ranks_to_show(options.ranks, run.spec.world_size, "%tpu_attach --ranks")
        age = max(0.0, time.time() - run.dir.spec.stat().st_mtime)
        view = RunView(run.spec, run.dir, logs=shown_ranks, age=age, stop=html.LEAVE)
        with counted_interrupts() as interrupts:
            result = follow_attached(run, view, interrupts)
        if result is None:
            print(f"run {run.dir.id} is still running; %tpu_stop {run.dir.id} stops it")
            return None
        delivery = self.returned.add(
            ReturnedRun(self.history.running(), run.dir, run.spec.returns, options.out)
        )
        return self.hand_over(result, options, delivery, told=view.shows_everything)

    def stop(self, wanted: str | None) -> None:
        """`%tpu_stop`: request a stop, and wait until the run has ended."""
        for line in stop(self.defaults.runs, wanted, "%tpu_stop", StopOrigin.MAGIC):
            print(line, flush=True)


def _describe(request: RunRequest) -> str:
    from tpunb.kernel import pipeline

    return pipeline.describe_plan(request)


def _brought(options: TrainOptions) -> set[str]:
    """Return the names that a run assigns in the notebook."""
    return {*options.returns, *([] if options.out is None else [options.out])}


def preload() -> None:
    """Import and read everything that the first train cell needs in the kernel."""
    importlib.import_module("tpunb.kernel.pipeline")
    with suppress(ImportError):  # a kernel's environment without it has no panel
        importlib.import_module("ipywidgets")
    importlib.import_module("tpunb.notebook.convert.convert").warm_up()
    importlib.import_module("tpunb.diagnostics.failure.rules").rules()
