"""Training loops inside a framework: the calls that start them, and what runs in each step."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpunb.notebook.lint.names import call, dotted, last_part
from tpunb.notebook.lint.walk import DefinedFunction, Site

if TYPE_CHECKING:
    from tpunb.notebook.lint.index import NotebookIndex


@dataclass(frozen=True)
class Framework:
    """A library with a training loop of its own."""

    name: str
    packages: tuple[str, ...]
    makes: Callable[[str], bool]
    """Whether something with this last name makes what trains."""
    usual: tuple[str, ...]
    """Last parts of the names that it has, where nothing shows what made it."""
    methods: tuple[str, ...]
    """What starts the loop."""
    steps: tuple[str, ...] = ()
    """Methods that the loop calls in each step."""
    reduces: bool = True
    """Whether its ranks train one model on XLA devices, without more code."""


FRAMEWORKS = (
    Framework(
        "transformers",
        ("transformers", "trl"),
        lambda name: name.endswith("Trainer"),
        ("trainer",),
        ("train",),
        ("compute_loss", "training_step"),
    ),
    Framework(
        "Lightning",
        ("lightning", "pytorch_lightning"),
        lambda name: name == "Trainer",
        ("trainer",),
        ("fit",),
        ("training_step",),
    ),
    Framework(
        "ignite",
        ("ignite",),
        lambda name: name in ("Engine", "create_supervised_trainer"),
        ("trainer",),
        ("run",),
        reduces=False,
    ),
    Framework(
        "fastai",
        ("fastai", "fastai2"),
        lambda name: name.lower().endswith("learner"),
        ("learn", "learner"),
        ("fit", "fit_one_cycle", "fit_flat_cos", "fit_sgdr", "fine_tune"),
        reduces=False,
    ),
)
ACCELERATE = Framework(
    "Accelerate",
    ("accelerate",),
    lambda name: name == "Accelerator",
    ("accelerator",),
    ("backward",),
)
"""Its loops are written out, but for the backward pass."""


@dataclass(frozen=True)
class Fit:
    """A call that trains in a framework."""

    site: Site
    framework: Framework


def fits(notebook: NotebookIndex, frameworks: Sequence[Framework] = FRAMEWORKS) -> Iterator[Fit]:
    """The calls that train: `trainer.train()`, `trainer.fit(…)`, `trainer.run(loader)`,
    `learn.fit_one_cycle(…)`.
    """
    for framework in frameworks:
        if notebook.imports(*framework.packages):
            for name in framework.methods:
                for site in notebook.called.get(name, ()):
                    function = call(site).func
                    if isinstance(function, ast.Attribute) and _is_made(
                        notebook, function.value, site, framework
                    ):
                        yield Fit(site, framework)


def _is_made(notebook: NotebookIndex, node: ast.expr, site: Site, framework: Framework) -> bool:
    """Whether an expression is what a framework trains with."""
    if isinstance(node, ast.Call):
        return _makes(notebook, node.func, site, framework)
    if not (name := dotted(node)):
        return False
    values = notebook.values(name, site.frame)
    if values:
        return any(
            isinstance(value.node, ast.Call) and _makes(notebook, value.node.func, value, framework)
            for value in values
        )
    return name.rpartition(".")[2].lower() in framework.usual


def _makes(notebook: NotebookIndex, maker: ast.expr, site: Site, framework: Framework) -> bool:
    """Whether a class or function is the framework's, or a class of the notebook made of it."""
    name = last_part(maker)
    if name in notebook.bases:
        return any(_makes(notebook, base, site, framework) for base in notebook.bases[name])
    full = notebook.full(maker, site)
    known = not full or full.partition(".")[0] in framework.packages
    return known and name not in notebook.functions and framework.makes(name)


def makers(notebook: NotebookIndex, fit: Fit) -> list[Site]:
    """The calls that made what trains, as far as they are seen."""
    function = call(fit.site).func
    name = dotted(function.value) if isinstance(function, ast.Attribute) else ""
    values = notebook.values(name, fit.site.frame) if name else []
    return [
        value
        for value in values
        if isinstance(value.node, ast.Call)
        and _makes(notebook, value.node.func, value, fit.framework)
    ]


def top_level(notebook: NotebookIndex, site: Site, depth: int = 4) -> Iterator[Site]:
    """Where cells call a site: itself, or the calls of the function that it stands in."""
    function = site.frame.function
    if function is None:
        yield site
    elif depth and function.name:
        for caller in notebook.called.get(function.name, ()):
            if function in notebook.targets(caller):
                yield from top_level(notebook, caller, depth - 1)


def step_functions(notebook: NotebookIndex) -> Iterator[DefinedFunction]:
    """The functions of the notebook that a framework calls in each step."""
    for name in dict.fromkeys(name for fit in notebook.fits for name in fit.framework.steps):
        yield from (f for f in notebook.functions.get(name, ()) if f.method_of is not None)
    for site in notebook.calls_of("ignite.engine.Engine", "ignite.engine.engine.Engine"):
        for given in call(site).args[:1]:
            for function in notebook.functions.get(last_part(given), ()):
                if any(last_part(call(one).func) == "backward" for one in function.calls):
                    yield function
