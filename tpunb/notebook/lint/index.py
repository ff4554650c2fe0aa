"""The index that rules query: calls by name, values of names, ranks, training loops."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from tpunb.notebook.scopes import (
    DEVICES,
    KNOWN,
    LAUNCHERS,
    LOOPS,
    TPUNB_LAUNCH,
    XM,
    DefinedFunction,
    Frame,
    ParsedCell,
    Site,
    argument,
    dotted,
    last_part,
    literal,
    packages,
    words,
)
from tpunb.runs.spec import BackendName

RANKS = re.compile(
    r"(local_|global_|world_|proc_|process_)?(rank|ordinal)|(get_)?(local_|global_)?(rank|ordinal)"
    r"|is_master(_ordinal)?|is_(local_|world_|global_)?(main|master)_process|is_main|is_global_zero"
    r"|is_rank_?(0|zero)|(xla_)?is_master_ordinal"
)
"""Names whose values differ between ranks."""
RANK_CALLS = {
    f"{XM}.is_master_ordinal",
    f"{XM}.get_ordinal",
    f"{XM}.get_local_ordinal",
    "torch_xla.runtime.global_ordinal",
    "torch_xla.runtime.local_ordinal",
    "torch_xla.runtime.process_index",
    "torch.distributed.get_rank",
}
_TPU_DEVICES: dict[BackendName, tuple[str | None, frozenset[str]]] = {
    "xla": ("xla", frozenset({"torch_xla.device", f"{XM}.xla_device"})),
    "torchtpu": ("tpu", frozenset({"torch.accelerator.current_accelerator"})),
    "torch": (None, frozenset()),
}
"""The name of the TPU device with each backend, and the calls that return the device."""


@dataclass(frozen=True)
class Framework:
    """A library whose `Trainer`, or class with such a name, has the training loop."""

    name: str
    packages: tuple[str, ...]
    start: str
    """The method of a trainer that starts the loop."""
    steps: tuple[str, ...]
    """Methods that the loop calls in each step."""


FRAMEWORKS = (
    Framework("transformers", ("transformers", "trl"), "train", ("compute_loss", "training_step")),
    Framework("Lightning", ("lightning", "pytorch_lightning"), "fit", ("training_step",)),
)
PACKAGES = {
    *("accelerate", "pytorch_lightning", "lightning", "fastai", "fastai2", "catalyst", "poutyne"),
    *("fastai_xla_extensions", "ignite", "composer", "trl", "lightning_fabric"),
}
"""Packages that reduce gradients, mark steps and shard data themselves."""


class NotebookIndex:
    """The code cells of a notebook, with their calls, names and functions by name."""

    def __init__(
        self,
        cells: list[ParsedCell],
        held: Container[str] = (),
        backend: BackendName = "xla",
        ranks: int | None = None,
    ) -> None:
        self.cells = cells
        self.ranks = ranks
        """The number of ranks of the run; None if it is not known."""
        self.backend: BackendName = backend
        self.held = held
        self.sites = KNOWN.scopes(cells)
        self.functions = self.sites.by_name
        self.named: dict[str, list[Site]] = {}
        """Full name → its calls."""
        self.called: dict[str, list[Site]] = {}
        """Last part of a name → its calls: `step` for `self.optimizer.step()`."""
        for site in self.sites.calls:
            called = site.call.func
            if name := last_part(called):
                self.called.setdefault(name, []).append(site)
            full = self.full(called, site)
            if full:
                self.named.setdefault(full, []).append(site)
        self.has_train = any(cell.part == "train" for cell in cells)

    # Names and values

    def full(self, node: ast.AST, site: Site) -> str:
        """Return the full dotted name of an expression at a site; '' if it has none."""
        return self.sites.full(node, site.scope)

    def calls_of(self, *names: str) -> Iterator[Site]:
        """The calls of functions with these full names."""
        for name in names:
            yield from self.named.get(name, ())

    def imports(self, *packages: str) -> bool:
        """Whether one of the packages is imported anywhere."""
        return any(package in self.packages for package in packages)

    @cached_property
    def packages(self) -> set[str]:
        return set().union(*(packages(site.node) for site in self.sites.imports))

    def values(self, name: str, frame: Frame) -> list[Site]:
        """The values that are assigned to a dotted name ('model', 'self.model') in the function of
        `frame` or, if that does not bind the name, in the scopes around it; each as a site.
        """
        assigned = self._assigned.get(name, [])
        if "." in name:
            return assigned
        home = frame.scope.find(name)
        return [site for site in assigned if site.scope.find(name) is home]

    @cached_property
    def _assigned(self) -> dict[str, list[Site]]:
        assigned: dict[str, list[Site]] = {}
        for site in self.sites.assigns:
            node = site.node
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    pairs = [(target, node.value)]
                    if isinstance(target, ast.Tuple | ast.List):
                        values = [node.value] * len(target.elts)
                        if isinstance(node.value, ast.Tuple | ast.List) and len(
                            node.value.elts
                        ) == len(target.elts):
                            values = node.value.elts
                        pairs = list(zip(target.elts, values, strict=True))
                    for left, value in pairs:
                        if name := dotted(left):
                            assigned.setdefault(name, []).append(Site(value, site.frame))
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                assigned.setdefault(dotted(node.target), []).append(Site(node.value, site.frame))
        return assigned

    def is_tpu_device(self, node: ast.expr, site: Site, depth: int = 0) -> bool:
        """Whether an expression is the backend's TPU device: a call, a string, or a name with such
        a value.
        """
        name, makers = _TPU_DEVICES[self.backend]
        if isinstance(node, ast.Constant):
            return isinstance(node.value, str) and node.value.partition(":")[0] == name
        if isinstance(node, ast.Call):
            full = self.full(node.func, site)
            if full in makers:
                return True
            return full == "torch.device" and any(
                self.is_tpu_device(argument, site, depth) for argument in node.args[:1]
            )
        if isinstance(node, ast.IfExp):
            return any(self.is_tpu_device(part, site, depth) for part in (node.body, node.orelse))
        name = dotted(node)
        if not name or depth > 3:
            return False
        values = self.values(name, site.frame)
        return any(
            isinstance(value.node, ast.expr) and self.is_tpu_device(value.node, value, depth + 1)
            for value in values
        )

    def names_of(self, value: ast.AST) -> list[str]:
        """The names to which a value is assigned."""
        return self._names.get(id(value), [])

    @cached_property
    def _names(self) -> dict[int, list[str]]:
        names: dict[int, list[str]] = {}
        for name, values in self._assigned.items():
            for value in values:
                names.setdefault(id(value.node), []).append(name)
        return names

    @cached_property
    def _calls_of_cell(self) -> dict[int, list[Site]]:
        calls: dict[int, list[Site]] = {}
        for site in self.sites.calls:
            calls.setdefault(site.cell.index, []).append(site)
        return calls

    def calls_taking(self, name: Site) -> list[ast.Call]:
        """The calls to which a name itself is passed as a positional argument."""
        calls = (site.call for site in self._calls_of_cell.get(name.cell.index, ()))
        return [one for one in calls if any(part is name.node for part in one.args)]

    # The kind of notebook

    @cached_property
    def xla(self) -> bool:
        """Whether the notebook uses torch_xla itself."""
        return self.imports("torch_xla", "torch_xla_py")

    @property
    def native(self) -> bool:
        """Whether the notebook uses its backend itself, not only a framework that does."""
        return self.xla or self.backend != "xla"

    @cached_property
    def runs_on_tpu(self) -> bool:
        """Whether anything indicates a TPU: torch_xla, TorchTPU, a train cell, a launcher."""
        return self.native or self.has_train or bool(self.launches)

    @cached_property
    def on_device(self) -> bool:
        """Whether the notebook trains on a TPU device, chosen by itself or by a framework."""
        own = self.native and self.uses_device
        return own or (self.managed and self.runs_on_tpu)

    @cached_property
    def uses_device(self) -> bool:
        """Whether a call starts the runtime of the TPU device."""
        if any(name in self.named for name in DEVICES):
            return True
        for name in ("to", "zeros", "ones", "tensor", "randn", "rand", "empty", "full", "arange"):
            for site in self.called.get(name, ()):
                target = argument(site.call, "device", 0 if name == "to" else None)
                if target is not None and self.is_tpu_device(target, site):
                    return True
        return False

    @cached_property
    def data_loaders(self) -> list[Site]:
        """The calls of torch's DataLoader."""
        names = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
        return list(self.calls_of(*names))

    @cached_property
    def managed(self) -> bool:
        """Whether a framework makes the training loop work on several cores."""
        return self.imports(*PACKAGES) or bool(self.fits)

    @cached_property
    def launches(self) -> list[Site]:
        """The calls of `torch_xla.launch` and other launchers."""
        launches = [site for name in LAUNCHERS for site in self.named.get(name, ())]
        return sorted(launches, key=lambda site: site.place)

    @cached_property
    def several(self) -> bool:
        """Whether several ranks run the notebook's programs."""
        spmd = self.called.keys() & {"use_spmd", "mark_sharding", "use_fsdp_v2"}  # one process
        return self.ranks != 1 and not spmd and bool(self.programs)

    @cached_property
    def programs(self) -> list[Program]:
        """What ranks run: each train cell, and each function that is launched from elsewhere."""
        programs = []
        for cell in self.cells:
            if cell.part == "train":
                calls = self._calls_of_cell.get(cell.index, ())
                called = [f for site in calls for f in self.sites.called(site)]
                here = words("\n".join(cell.plain))
                named = [
                    function
                    for name in self._named
                    if name in here and any(site.cell is cell for site in self.sites.loads(name))
                    for function in self._named[name]
                ]
                programs.append(Program(cell, self._reached(called + named)))
        for site in self.launches:
            if not _for_one_process(site.call) and not any(site in program for program in programs):
                programs.append(Program(None, self._reached(self.sites.launched(site.call))))
        return programs

    def _reached(self, todo: list[DefinedFunction]) -> set[int]:
        """These functions and those that they reach by name, by their node's id()."""
        entered: set[int] = set()
        while todo:
            function = todo.pop()
            if id(function.node) not in entered:
                entered.add(id(function.node))
                todo += [f for name in function.loads for f in self._named.get(name, ())]
                todo += [f for site in function.calls for f in self.sites.called(site)]
                todo += self._lambdas.get(id(function), ())
        return entered

    @cached_property
    def _named(self) -> dict[str, list[DefinedFunction]]:
        """The functions by name; of a class, the methods that Python and torch call themselves."""
        named: dict[str, list[DefinedFunction]] = {}
        for function in self.sites.functions:
            if function.method_of is None:
                named.setdefault(function.name, []).append(function)
            elif function.name == "forward" or function.name.startswith("__"):
                named.setdefault(function.method_of.name, []).append(function)
        named.pop("", None)
        for name in self.bases:
            todo, seen = [name], {name}
            while todo:
                inherited = {last_part(base) for base in self.bases.get(todo.pop(), ())} - seen
                seen |= inherited
                todo += inherited
            every = [f for each in sorted(seen) for f in named.get(each, ())]
            named[name] = [f for f in every if f.method_of is not None] or named.get(name, [])
        return named

    @cached_property
    def _lambdas(self) -> dict[int, list[DefinedFunction]]:
        """The lambdas in each function, by the function's id()."""
        inside: dict[int, list[DefinedFunction]] = {}
        for function in self.sites.functions:
            if not function.name and function.outer.function is not None:
                inside.setdefault(id(function.outer.function), []).append(function)
        return inside

    def in_rank(self, site: Site) -> bool:
        """Whether a site runs on every core."""
        return site.cell.part != "kernel" and any(site in program for program in self.programs)

    # Training loops

    @cached_property
    def loops(self) -> list[Loop]:
        """The innermost training loops, in order, and the step functions of frameworks."""
        return [*_training_loops(self), *_steps(self)]

    @cached_property
    def fits(self) -> list[Fit]:
        """The calls that train with a framework: `trainer.fit(…)`."""
        return list(_fits(self))

    @cached_property
    def bases(self) -> dict[str, list[ast.expr]]:
        """The classes of the notebook with their base classes."""
        return {
            site.node.name: site.node.bases
            for site in self.sites.classes
            if isinstance(site.node, ast.ClassDef)
        }

    # Ranks

    def depends_on_rank(self, test: ast.expr, site: Site, depth: int = 0) -> bool:
        """Whether the result of a condition depends on the rank."""
        index = self.rank_parameter(site.frame.function) if site.frame.function else None
        for node in _compared(test):
            if isinstance(node, ast.Call) and self.full(node.func, site) in RANK_CALLS:
                return True
            if not isinstance(node, ast.Name | ast.Attribute):
                continue
            if RANKS.fullmatch(last_part(node).lower()) or (index and dotted(node) == index):
                return True
            if depth < 2 and isinstance(node, ast.Name):
                for value in self.values(node.id, site.frame):
                    assert isinstance(value.node, ast.expr)
                    if self._is_rank(value.node, value, depth):
                        return True
        return False

    def _is_rank(self, value: ast.expr, site: Site, depth: int) -> bool:
        if isinstance(value, ast.Compare | ast.BoolOp | ast.UnaryOp):
            return self.depends_on_rank(value, site, depth + 1)
        return isinstance(value, ast.Call) and self.full(value.func, site) in RANK_CALLS

    def rank_parameter(self, function: DefinedFunction) -> str | None:
        """Return the parameter in which a launched function gets its rank."""
        for site in self.launches:
            target = argument(site.call, "fn", 0)
            full = self.full(site.call.func, site)
            gives = full != TPUNB_LAUNCH and "notebook_launcher" not in full
            if gives and isinstance(target, ast.Name) and target.id == function.name:
                return function.parameters[0] if function.parameters else None
        return None


def _for_one_process(launch: ast.Call) -> bool:
    """Whether a launcher is called for a single process."""
    sizes = (literal(argument(launch, word)) for word in ("nprocs", "num_processes", "cores"))
    return 1 in sizes or literal(argument(launch, "debug_single_process")) is True


def _compared(test: ast.expr) -> Iterator[ast.AST]:
    """Yield the nodes of a condition, except comparisons whose result is the same on all ranks:
    with None ("is it set?") and with -1 ("one process only").
    """
    todo: list[ast.AST] = [test]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Compare) and any(
            (isinstance(part, ast.Constant) and part.value is None)
            or (isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.USub))
            for part in node.comparators
        ):
            continue
        yield node
        todo += ast.iter_child_nodes(node)


@dataclass(frozen=True)
class Program:
    """What ranks run together: a train cell with all that it calls, or a launched function."""

    cell: ParsedCell | None
    """The train cell; None for a function that is launched from elsewhere."""
    functions: set[int]
    """The functions that it reaches by name, by their node's id()."""

    def __contains__(self, site: Site) -> bool:
        """Whether ranks run a site."""
        if site.frame.function is None:
            return site.cell is self.cell
        return _is_in(site, self.functions)


def _is_in(site: Site, functions: set[int]) -> bool:
    """Whether a site is in one of these functions, or in one that is defined there."""
    function = site.frame.function
    while function is not None:
        if id(function.node) in functions:
            return True
        function = function.outer.function
    return False


@dataclass(frozen=True)
class Loop:
    """A training loop, in which `backward` is called directly or in a function that the loop calls;
    or a function that a framework calls in each step.
    """

    frame: Frame
    """The loop's body."""
    sites: tuple[Site, ...]
    """The calls in it."""
    called: tuple[Site, ...]
    """The calls in those functions of the notebook that it calls."""

    @property
    def node(self) -> ast.For | ast.AsyncFor | ast.While:
        """The loop statement; not for the step function of a framework."""
        node = self.frame.node
        assert isinstance(node, ast.For | ast.AsyncFor | ast.While)
        return node


def _training_loops(notebook: NotebookIndex) -> list[Loop]:
    """The innermost loops around the calls of `backward`, in order."""
    loops: dict[int, Frame] = {}
    for site in notebook.called.get("backward", ()):
        _loops_around(notebook, site, loops, set())
    inside = _calls_in(notebook, loops)
    return [
        Loop(frame, tuple(inside[key]), tuple(_calls_reached(notebook, inside[key])))
        for key, frame in loops.items()
    ]


def _steps(notebook: NotebookIndex) -> list[Loop]:
    """The functions that a framework calls in each step, as loops."""
    loops = []
    for name in dict.fromkeys(name for fit in notebook.fits for name in fit.framework.steps):
        for function in notebook.functions.get(name, ()):
            if function.method_of is not None and function.calls:
                *_, body = function.calls[0].frame.outward()
                sites = tuple(function.calls)
                loops.append(Loop(body, sites, tuple(_calls_reached(notebook, sites))))
    return loops


def _loops_around(
    notebook: NotebookIndex, site: Site, loops: dict[int, Frame], seen: set[int]
) -> None:
    """Add the loop around a call, or those around the calls of the function that contains it."""
    frame = site.loop()
    if frame is not None:
        loops.setdefault(id(frame.node), frame)
        return
    function = site.frame.function
    if function is None or id(function) in seen or not function.name:
        return
    seen.add(id(function))
    if len(seen) > 4 or len(notebook.functions[function.name]) > 1:
        return
    for caller in notebook.called.get(function.name, ()):
        if function in notebook.sites.targets(caller.call):
            _loops_around(notebook, caller, loops, seen)


def _calls_in(notebook: NotebookIndex, wanted: dict[int, Frame]) -> dict[int, list[Site]]:
    """The calls in the bodies of these loops, except in functions defined there."""
    calls: dict[int, list[Site]] = {key: [] for key in wanted}
    for site in notebook.sites.calls if wanted else ():
        for frame in site.frame.outward():
            if id(frame.node) in calls and isinstance(frame.node, LOOPS) and frame.part == "body":
                calls[id(frame.node)].append(site)
    return calls


def _calls_reached(notebook: NotebookIndex, sites: Iterable[Site]) -> list[Site]:
    """The calls in those functions of the notebook that these calls reach by name."""
    calls: list[Site] = []
    entered: set[int] = set()
    todo = list(sites)
    while todo:
        for function in notebook.sites.targets(todo.pop().call):
            if id(function) not in entered:
                entered.add(id(function))
                calls += function.calls
                todo += function.calls
    return calls


@dataclass(frozen=True)
class Fit:
    """A call that trains in a framework."""

    site: Site
    framework: Framework
    makers: list[Site]
    """The calls that constructed the trainer, as far as they are visible."""


def _fits(notebook: NotebookIndex) -> Iterator[Fit]:
    """The calls that train: `trainer.train()`, `trainer.fit(…)`."""
    for framework in FRAMEWORKS:
        starts = notebook.called.get(framework.start, ())
        for site in starts if notebook.imports(*framework.packages) else ():
            if not isinstance(site.call.func, ast.Attribute):
                continue
            trainer = site.call.func.value
            made = [Site(trainer, site.frame)]
            if not isinstance(trainer, ast.Call):
                made = notebook.values(dotted(trainer), site.frame)
            makers = [
                value
                for value in made
                if isinstance(value.node, ast.Call)
                and _makes(notebook, value.node.func, value, framework)
            ]
            if makers or (not made and last_part(trainer).lower() == "trainer"):
                yield Fit(site, framework, makers)


def _makes(notebook: NotebookIndex, maker: ast.expr, site: Site, framework: Framework) -> bool:
    """Whether a class or function makes the framework's trainers, or derives from such a class."""
    name = last_part(maker)
    if name in notebook.bases:
        return any(_makes(notebook, base, site, framework) for base in notebook.bases[name])
    full = notebook.full(maker, site)
    known = not full or full.partition(".")[0] in framework.packages
    return known and name not in notebook.functions and name.endswith("Trainer")
