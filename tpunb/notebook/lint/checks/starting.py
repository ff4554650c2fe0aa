"""Lint rules on how ranks are started, and on code that must not run before they are."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpunb.notebook.lint.checks.sites import has_spread
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.rules import XLA, Hit, rule
from tpunb.notebook.scopes import XM, Site, argument, dotted, literal

SPAWN = "torch_xla.distributed.xla_multiprocessing.spawn"
LAUNCH = "torch_xla.launch"
ACCELERATE = ("accelerate.notebook_launcher", "accelerate.launchers.notebook_launcher")


@rule(
    "nprocs",
    "error",
    what="xmp.spawn with `nprocs` other than 1 or None, in a notebook without %%tpu_train",
    why="ValueError: Unsupported nprocs (torch_xla 2.9.0 _internal/pjrt.py; since 2.6)",
    fix="remove nprocs to use every core, or put the call under %%tpu_train, where the run's "
    "number of cores is used",
    kernel=True,
    backends=XLA,
)
def _nprocs(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of(SPAWN):
        value = argument(site.call, "nprocs", 2)
        if value is None or site.cell.part == "train" or notebook.in_rank(site):
            continue
        if (number := _number(notebook, value, site)) not in (1, None):
            message = f"xmp.spawn(nprocs={number}) raises ValueError: only 1 and None work"
            yield Hit(site, message)


def _number(notebook: NotebookIndex, node: ast.AST, site: Site) -> int | None:
    """The number that an expression evaluates to; None if that is not certain."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    values = list[Site]()
    if isinstance(node, ast.Subscript):
        values = list(_items(notebook, node, site))
    elif isinstance(node, ast.Name | ast.Attribute):
        values = notebook.values(dotted(node), site.frame)
        values = [value for value in values if not isinstance(value.node, ast.Name)]
    numbers = {_number(notebook, value.node, value) for value in values}
    return numbers.pop() if len(numbers) == 1 else None


def _items(notebook: NotebookIndex, node: ast.Subscript, site: Site) -> Iterator[Site]:
    """Yield the possible values of `FLAGS['num_cores']`: `FLAGS['num_cores'] = 8`,
    `FLAGS = {'num_cores': 8}`.
    """
    key, name = literal(node.slice), dotted(node.value)
    if key is ... or not name:
        return
    for assign in notebook.sites.assigns:
        for target in assign.node.targets if isinstance(assign.node, ast.Assign) else ():
            if not isinstance(target, ast.Subscript) or dotted(target.value) != name:
                continue
            if literal(target.slice) == key:
                yield Site(assign.node.value, assign.frame)  # type: ignore[attr-defined]
    for value in notebook.values(name, site.frame):
        if isinstance(value.node, ast.Dict):
            for given, item in zip(value.node.keys, value.node.values, strict=True):
                if literal(given) == key:
                    yield Site(item, value.frame)


@rule(
    "spawn-from-notebook",
    "error",
    what="torch_xla.launch or xmp.spawn with start method spawn and a function of the notebook",
    why="a spawned process cannot find a function that a cell defines: BrokenProcessPool, or "
    "\"Can't get attribute '_mp_fn' on <module '__main__'>\" (measured with torch_xla 2.9.0; "
    "pytorch/xla#2750, #7761)",
    fix="put the call under %%tpu_train, or pass start_method='fork'",
    kernel=True,
    backends=XLA,
)
def _spawn_from_notebook(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of(LAUNCH, SPAWN):
        node = site.call
        if site.cell.part == "train" or notebook.in_rank(site) or notebook.one_process(site):
            continue
        target = argument(node, "fn", 0)
        name = target.id if isinstance(target, ast.Name) else ""
        if not isinstance(target, ast.Lambda) and name not in notebook.functions:
            continue
        at = 2 if notebook.full(node.func, site) == LAUNCH else 5
        method = argument(node, "start_method", at)
        if literal(method) == "spawn" or (method is None and not has_spread(node)):
            shown = f"`{name}`" if name else "the lambda"
            yield Hit(site, f"the start method is spawn, and {shown} is defined in the notebook")


@rule(
    "device-before-ranks",
    "error",
    what="an XLA device used before the ranks are started",
    why="RuntimeError: Runtime is already initialized. Do not use the XLA device before calling "
    "xmp.spawn. Above a %%tpu_train cell it works, but every rank then runs these cells itself "
    "(measured with torch_xla 2.9.0; pytorch/xla#9303)",
    fix="use devices only inside the function that is launched",
    backends=XLA,
)
def _device_before_ranks(notebook: NotebookIndex) -> Iterator[Hit]:
    launches = [site for site in notebook.launches if not notebook.one_process(site)]
    end = max((site.place for site in launches), default=(-1, 0))
    for site in notebook.device_uses:
        if site.frame.function is not None or site.cell.part != "prelude":
            continue
        if notebook.has_train:
            yield Hit(
                site,
                "an XLA device is used above the %%tpu_train cell, so every rank runs the cells "
                "above that cell itself",
                "move it into the %%tpu_train cell, so that data is loaded once for all cores",
                severity="hint",
            )
            return
        if site.place < end:
            sure = not any(True for _ in site.conditions()) and site.simple()
            message = "an XLA device is used in the kernel before the ranks are started"
            yield Hit(site, message, severity=None if sure else "warning")
            return


@rule(
    "device-number",
    "warning",
    what="a device chosen by the rank's number",
    why="a process has one device, number 0: IndexError for any other number (measured with "
    "torch_xla 2.9.0; pytorch/xla#2338)",
    fix="write `torch_xla.device()` without a number",
    backends=XLA,
)
def _device_number(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of("torch_xla.device", f"{XM}.xla_device"):
        value = argument(site.call, "n", 0) or argument(site.call, "index")
        if value is None or not (notebook.multi or notebook.launches) or not notebook.in_rank(site):
            continue
        number, function = literal(value), site.frame.function
        if type(number) is int and number > 0:
            yield Hit(site, f"device number {number}: a rank has only number 0")
        elif function and (name := dotted(value)) and name == notebook.rank_parameter(function):
            yield Hit(site, "the device is chosen by the rank's number: a rank has only number 0")


@rule(
    "accelerator-before-ranks",
    "error",
    what="an `Accelerator()` created before notebook_launcher is called",
    why="ValueError: the `Accelerator` should only be initialized inside your training function "
    "(accelerate 1.15 launchers.py)",
    fix="create the Accelerator inside the function that is launched",
)
def _accelerator_before_ranks(notebook: NotebookIndex) -> Iterator[Hit]:
    launches = [s for s in notebook.calls_of(*ACCELERATE) if s.cell.part == "prelude"]
    end = max((site.place for site in launches), default=(-1, 0))
    for site in notebook.calls_of("accelerate.Accelerator"):
        if site.place < end and site.simple() and site.frame.function is None:
            yield Hit(site, "an Accelerator is created in the kernel, before notebook_launcher")


@rule(
    "processes-on-tpu",
    "hint",
    what="notebook_launcher with a number of processes, outside %%tpu_train",
    why="on Colab's and Kaggle's TPUs the number is ignored; on any other TPU machine accelerate "
    "starts that many GPU processes, and they fail (accelerate 1.15 launchers.py)",
    fix="put the call under %%tpu_train, where the run's number of cores is used",
    backends=XLA,
)
def _processes_on_tpu(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of(*ACCELERATE):
        given = argument(site.call, "num_processes", 2) is not None
        if given and site.cell.part == "prelude" and not notebook.one_process(site):
            yield Hit(site, "num_processes starts GPU processes if accelerate detects no TPU")


def _after_spmd(notebook: NotebookIndex, site: Site) -> bool:
    """Whether SPMD is certainly on, in the same process, when a site is reached."""
    for use in notebook.calls_of("torch_xla.runtime.use_spmd"):
        # Each train cell is a run of its own; other cells may be part of none.
        parts = {use.cell.part, site.cell.part}
        same = use.cell is site.cell or ("kernel" not in parts and parts != {"train"})
        if same and use.place < site.place and use.frame.function is None and use.simple():
            return True
    return False


@rule(
    "spmd-launch",
    "error",
    what="torch_xla.launch, or torch.distributed's backend xla, after xr.use_spmd()",
    # Not unfinished work: torch_xla's own messages.
    why="NotImplementedError: launch function does not support SPMD at this time; AssertionError: "
    "XLA backend is not supported with SPMD (measured with torch_xla 2.9.0)",
    fix="call the function itself, without a process group: with SPMD there is one process",
    backends=XLA,
)
def _spmd_launch(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of(LAUNCH, "torch.distributed.init_process_group"):
        launches = notebook.full(site.call.func, site) == LAUNCH
        group = not launches and literal(argument(site.call, "backend", 0)) == "xla"
        if (launches or group) and _after_spmd(notebook, site):
            what = "torch_xla.launch" if launches else "the backend xla"
            yield Hit(site, f"{what} does not work after xr.use_spmd()", certain=True)
