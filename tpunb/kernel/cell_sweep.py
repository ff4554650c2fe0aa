"""`%%tpu_train --grid`: run one cell with all combinations of values, and show a table of them.

The trials are runs of this kernel, one after the other, and start from the kept prelude. Their
states are in a sweep folder, as for `tpunb sweep`: the same cell, executed again, continues there.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from tpunb.kernel import cost
from tpunb.kernel.launcher import Run, follow_to_end
from tpunb.kernel.session import INTERRUPTED, Session
from tpunb.notebook.parsing import parse_cells
from tpunb.notebook.scopes import bound_names
from tpunb.runs.spec import RunState
from tpunb.sweeps import folder as folders
from tpunb.sweeps import space as spaces
from tpunb.sweeps.folder import SweepDir, SweepKind, SweepSpec, Trial, TrialState
from tpunb.sweeps.study import Study
from tpunb.sweeps.table import SweepTable
from tpunb.sweeps.view import make_view
from tpunb.utils.interrupts import Interrupts, counted_interrupts
from tpunb.utils.literals import literal

if TYPE_CHECKING:
    from tpunb.kernel.options import TrainOptions
    from tpunb.kernel.pipeline import RunRequest

_ALONE = ("background", "detach", "dry_run", "stop_when_done")
"""Options of single runs that cannot be combined with --grid."""


def run_grid(session: Session, options: TrainOptions, cell: str) -> Study:
    """Run the cell once for each combination that is not complete yet.

    Raises UsageError for names that the notebook does not have and for values of another type, and
    any error that prevents a run from starting. Failed trials raise nothing: they are in the table.
    """
    with counted_interrupts() as interrupts:
        return _run_grid(session, options, cell, interrupts)


def _run_grid(session: Session, options: TrainOptions, cell: str, interrupts: Interrupts) -> Study:
    for name in _ALONE:
        if getattr(options, name):
            flag = {"background": "bg"}.get(name, name).replace("_", "-")
            raise UsageError(f"%%tpu_train --grid cannot be combined with --{flag}")
    known = {name: value for name, value in session.shell.user_ns.items() if _is_plain(value)}
    space = spaces.from_python(spaces.by_name(options.grid, "--grid"), {}, known)
    trials = spaces.grid_trials(space)
    single = replace(options, grid=())
    request = session.prepare(single, cell, interrupts, parameters=trials[0])
    request.raise_for_lint()
    _refuse_unknown(request, list(space))
    folder = _open(session, request, space, cell)
    with folder.locked():
        spec, known_trials = folder.read_spec(), folder.read_trials()
        left = [number for number in range(len(trials)) if not _is_done(known_trials.get(number))]
        cost.confirm(request.target, options, cost.ask_in_kernel, runs=len(left))
        single = replace(single, yes=True)
        request = replace(request, options=replace(request.options, yes=True))
        view = make_view(SweepTable(spec, {}, len(trials)), ())

        def put(trial: Trial) -> None:
            folder.write_trial(trial)
            known_trials[trial.number] = trial
            view.show(known_trials)

        with view:
            view.show(known_trials)
            for number in left:
                if interrupts.count:
                    break
                parameters = trials[number]
                trial = Trial(number, parameters, TrialState.RUNNING, started=time.time())
                if number:
                    request = session.prepare(single, cell, interrupts, parameters=parameters)
                run = session.start(request, interrupts)
                trial = replace(trial, runs=(str(run.dir.path),))
                put(trial)
                assert isinstance(run, Run)
                put(_follow(session, run, request, trial, spec, interrupts, view, known_trials))
            view.finish(known_trials, stopped=bool(interrupts.count))
    study = Study(folder, len(trials), shown=view.shows_everything)
    if options.out is not None:
        session.shell.user_ns[options.out] = study
    return study


def _is_done(trial: Trial | None) -> bool:
    """True unless the trial must run: a failed one does, as the user may have fixed its error."""
    return trial is not None and trial.state.over and trial.state is not TrialState.FAILED


def _follow(
    session: Session,
    run: Run,
    request: RunRequest,
    trial: Trial,
    spec: SweepSpec,
    interrupts: Interrupts,
    view: Any,
    known: Mapping[int, Trial],
) -> Trial:
    """Follow a trial's run; return the ended trial, or, if it was interrupted, a waiting one."""
    follow_to_end((view.show(known) for _ in run.events()), run, interrupts, INTERRUPTED)
    result = run.result()
    session.launcher.remember(request.notebook.script, result, run.spec)
    if interrupts.count and result.state is not RunState.SUCCEEDED:
        return replace(trial, state=TrialState.WAITING, started=None)
    ended = replace(
        trial,
        ended=time.time(),
        attempts=1,
        device=result.device,
        cores=result.spmd or result.world_size,
        chips=run.spec.chips,
        cost=result.cost,
    )
    ended = folders.measure(ended, spec)
    if result.state is RunState.SUCCEEDED:
        return replace(ended, state=TrialState.COMPLETE)
    error = result.headline().partition("\n")[0]
    return replace(ended, state=TrialState.FAILED, error=error)


def _refuse_unknown(request: RunRequest, names: list[str]) -> None:
    """Raise UsageError for a name that no cell above the train cell assigns."""
    snapshot = request.notebook.snapshot
    above = [c for c in parse_cells(snapshot) if c.index < (snapshot.train or 0)]
    given = {c.index for c in snapshot.cells if "injected-parameters" in c.tags}
    assigned: set[str] = set()
    for parsed in above:
        if parsed.index not in given:
            assigned |= bound_names(parsed.tree)
    for name in names:
        if name not in assigned:
            raise UsageError(
                f"%%tpu_train --grid {name}: no cell above assigns {name}; assign its default there"
            )


def _open(session: Session, request: RunRequest, space: spaces.Space, cell: str) -> SweepDir:
    snapshot = request.notebook.snapshot
    given = {c.index for c in snapshot.cells if "injected-parameters" in c.tags}
    end = (snapshot.train or 0) + 1
    cells = tuple(c for c in snapshot.cells[:end] if c.index not in given)
    beside = () if snapshot.path is None else (Path(snapshot.path).absolute().parent,)
    spec = SweepSpec(
        notebook=snapshot.path or snapshot.name,
        kind=SweepKind.GRID,
        space={name: tried.to_json() for name, tried in space.items()},
        metric=None,
        maximize=None,
        place=request.options.on or "",
        cores=str(request.cores),
        code=folders.code_digest(cells, tuple(dict.fromkeys((Path.cwd(), *beside)))),
        packages=folders.packages_digest(),
        cell=_digest(cell, [line for _, line in request.notebook.parameters.notes]),
    )
    return folders.open_sweep(session.defaults.runs, spec, again=False, copy=False)


def _digest(cell: str, taken: list[str]) -> str:
    """Return a digest of the train cell and of the values that it takes from the kernel."""
    return hashlib.sha256(json.dumps([cell, taken]).encode()).hexdigest()[:16]


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str)) and literal(value) is not None
