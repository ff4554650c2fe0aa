"""Finds values of train cells that cells below use, and that are not returned."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from tpunb.notebook.convert.earlier_values import TrainLine, train_line
from tpunb.notebook.convert.magics import RUN_HELPERS
from tpunb.notebook.lint.index import Fit, NotebookIndex, Program
from tpunb.notebook.scopes import (
    CHANGING,
    COMPREHENSIONS,
    LAUNCHERS,
    DefinedFunction,
    Frame,
    ParsedCell,
    Site,
    argument,
    dotted,
    last_part,
)


class Missing(Enum):
    """What a train cell does with a name that it does not return."""

    ONLY_ASSIGNED = auto()
    """No other cell assigns it."""
    TRAINED = auto()
    """A model."""
    HOLDS_MODEL = auto()
    """A trainer, which holds the model that it trains."""
    CHANGED = auto()
    """A list, a dict, or another object that is changed in place."""


@dataclass(frozen=True)
class NotReturned:
    """A use, below a train cell, of a value that is only in its ranks."""

    name: str
    train: ParsedCell
    site: Site
    """The first use."""
    how: Missing
    trainer: bool = False
    """True for a trainer of a framework, which cannot be returned itself."""


_BINDING = ("globals", "exec", *RUN_HELPERS)
"""Functions that may bind any name; `%run` is converted to one of the last three."""
_SAVING = ("save", "save_checkpoint", "save_model", "save_pretrained", "push_to_hub", "export")
_WRAPPERS = {"DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP", "compile"}
_SAME = ("to", "train", "eval", "cuda", "cpu", "half", "float", "bfloat16", "requires_grad_")
"""Methods of a model that return the model itself."""


def find_not_returned(notebook: NotebookIndex) -> Iterator[NotReturned]:
    """Yield one entry for each name and train cell, in the order of the train cells."""
    trains = {p.cell.index: p for p in notebook.programs if p.cell is not None}
    lines = {
        index: train_line("\n".join(program.cell.lines))
        for index, program in trains.items()
        if program.cell is not None
    }
    if not trains or notebook.sites.stars or any(cell.problem for cell in notebook.cells):
        return
    if any(line.unclear for line in lines.values()) or any(map(notebook.sites.loads, _BINDING)):
        return
    brought = {name for line in lines.values() for name in line.names}
    made = {cell.index: notebook.sites.bound(cell) for cell in notebook.cells}
    elsewhere = set().union(*(names for index, names in made.items() if index not in trains))
    for index, program in trains.items():
        train = program.cell
        assert train is not None
        changed = _changed(notebook, program)
        for name in sorted(made[index] - brought - elsewhere):
            trainer = changed.get(name) is Missing.HOLDS_MODEL
            for site in _reads_below(notebook, name, train):
                imports = any(one.full is not None for one in notebook.sites.globals.bindings[name])
                if name not in made[site.cell.index] and not imports:
                    yield NotReturned(name, train, site, Missing.ONLY_ASSIGNED, trainer)
                    break
        for name in sorted((changed.keys() & elsewhere) - {*lines[index].names}):
            how = changed[name]
            kept = how is not Missing.HOLDS_MODEL and _saves(notebook, program)
            if kept or _is_in_returns(notebook, name, lines[index], train):
                continue
            use = _first_stale_use(notebook, name, train, made)
            if use is not None:
                yield NotReturned(name, train, use, how, how is Missing.HOLDS_MODEL)


def _first_stale_use(
    notebook: NotebookIndex, name: str, train: ParsedCell, made: dict[int, set[str]]
) -> Site | None:
    """The first use of a name below a train cell, unless its value is replaced before."""
    for site in _reads_below(notebook, name, train):
        between = {cell for cell in made if train.index < cell <= site.cell.index}
        loads = notebook.sites.attributes("load_state_dict")
        if any(load.cell.index in between for load in loads):
            return None
        return None if any(name in made[cell] for cell in between) else site
    return None


def _reads_below(notebook: NotebookIndex, name: str, train: ParsedCell) -> Iterator[Site]:
    """Yield the sites in cells below a train cell that read a global name in the kernel."""
    for site in notebook.sites.loads(name):
        if site.cell.index > train.index and site.scope.find(name) is notebook.sites.globals:
            yield site


def _saves(notebook: NotebookIndex, program: Program) -> bool:
    return any(site in program for site in notebook.sites.attributes(*_SAVING))


def _is_in_returns(notebook: NotebookIndex, name: str, line: TrainLine, train: ParsedCell) -> bool:
    """Whether a returned value is made from an object: `state = model.state_dict()`."""
    return any(
        isinstance(part, ast.Name) and part.id == name
        for returned in line.returns
        for value in notebook.values(
            returned, Frame(train, train.tree, "body", None, None, notebook.sites.globals)
        )
        if value.cell is train
        for part in ast.walk(value.node)
    )


def _changed(notebook: NotebookIndex, program: Program) -> dict[str, Missing]:
    """The global names whose objects a program trains or changes."""
    found: dict[str, Missing] = {}
    origin = _Origin(notebook, program)
    for site in notebook.sites.subscripts:
        node = site.node
        assert isinstance(node, ast.Subscript)
        if isinstance(node.ctx, ast.Store) and site in program:
            found |= dict.fromkeys(origin.names(node.value, site), Missing.CHANGED)
    for site in notebook.sites.attributes(*CHANGING):
        node = site.node
        assert isinstance(node, ast.Attribute)
        if site in program and not notebook.full(node, site):
            found |= dict.fromkeys(origin.names(node.value, site), Missing.CHANGED)
    for site in notebook.sites.attributes("parameters"):
        assert isinstance(site.node, ast.Attribute)
        if site in program:
            found |= dict.fromkeys(origin.names(site.node.value, site), Missing.TRAINED)
    for site in notebook.sites.calls:
        if site in program:
            for optimizer in _stepped(site):
                for value in origin.values(optimizer, site):
                    for part in ast.walk(value.node):
                        if isinstance(part, ast.Attribute) and part.attr == "parameters":
                            names = origin.names(part.value, value)
                            found |= dict.fromkeys(names, Missing.TRAINED)
    for fit in notebook.fits:
        if fit.site in program:
            found |= _trained_by(fit, origin)
    return found


def _stepped(site: Site) -> Iterator[ast.expr]:
    """Yield the optimizer of `optimizer.step()` or `xm.optimizer_step(optimizer)`."""
    function = site.call.func
    if isinstance(function, ast.Attribute) and function.attr == "step":
        yield function.value
    elif last_part(function) == "optimizer_step":
        yield from site.call.args[:1]


def _trained_by(fit: Fit, origin: _Origin) -> dict[str, Missing]:
    """The global names of what a framework's call trains."""
    function = fit.site.call.func
    assert isinstance(function, ast.Attribute)
    models = [(argument(fit.site.call, "model", 0), fit.site)]
    holds = dict[str, Missing]()
    if fit.framework.name == "transformers":
        models = [(argument(made.call, "model", 0), made) for made in fit.makers]
        holds = dict.fromkeys(origin.names(function.value, fit.site), Missing.HOLDS_MODEL)
    names = (name for model, site in models if model for name in origin.names(model, site))
    return dict.fromkeys(names, Missing.TRAINED) | holds


@dataclass
class _Origin:
    """Follows local names and parameters of a program to the global names of their objects."""

    notebook: NotebookIndex
    program: Program

    def names(self, node: ast.expr, site: Site, depth: int = 0) -> Iterator[str]:
        """Yield the global names of the object that an expression is."""
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in _SAME:
                yield from self.names(node.func.value, site, depth)
            elif last_part(node.func) in _WRAPPERS and node.args:
                yield from self.names(node.args[0], site, depth)
        if not isinstance(node, ast.Name) or depth > 5:
            return
        function = self._owner(node.id, site)
        if function is None:
            yield node.id
            values = self.notebook.values(node.id, site.frame)
            own = [value for value in values if value in self.program]
        else:
            own = self.notebook.values(node.id, site.frame)
            if node.id in function.parameters:
                for given in self._arguments(function, node.id):
                    assert isinstance(given.node, ast.expr)
                    yield from self.names(given.node, given, depth + 1)
        for value in own:
            if isinstance(value.node, ast.expr):
                yield from self.names(value.node, value, depth + 1)

    def values(self, node: ast.expr, site: Site, depth: int = 0) -> Iterator[Site]:
        """Yield the values that a name may have, also those passed for a parameter."""
        name = dotted(node)
        if not name or depth > 5:
            return
        yield from self.notebook.values(name, site.frame)
        function = self._owner(name, site)
        if function is not None and name in function.parameters:
            for given in self._arguments(function, name):
                assert isinstance(given.node, ast.expr)
                yield from self.values(given.node, given, depth + 1)

    def _owner(self, name: str, site: Site) -> DefinedFunction | None:
        """The function to which a name is local; None for a global name."""
        home, function = site.scope.find(name), site.frame.function
        if home is not None and isinstance(home.node, COMPREHENSIONS):
            return function
        while function is not None and function.scope is not home:
            function = function.outer.function
        return function

    def _arguments(self, function: DefinedFunction, name: str) -> Iterator[Site]:
        """Yield the arguments that calls in the program pass for a parameter."""
        position = function.parameters.index(name)
        if function.method_of is not None:
            position -= 1
        for site in self.notebook.sites.calls:
            if site not in self.program or function not in self.notebook.sites.called(site):
                continue
            node, at = site.call, position
            if self.notebook.full(node.func, site) in LAUNCHERS:
                given = argument(node, "args", 1)
                parts = given.elts if isinstance(given, ast.Tuple | ast.List) else []
                node = ast.Call(node.func, parts, [])
                at -= self.notebook.rank_parameter(function) is not None
            value = argument(node, name, at) if at >= 0 else None
            if value is not None:
                yield Site(value, site.frame)
