"""A rule's texts for one failure: the library that makes the call, the name that was meant."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import re
from pathlib import Path

from tpunb.diagnostics.failure.evidence import LoggedException
from tpunb.diagnostics.failure.facts import Facts
from tpunb.diagnostics.failure.log import Log
from tpunb.diagnostics.failure.origin import Origin, version_of
from tpunb.diagnostics.failure.rules import FailureRule, named_in
from tpunb.notebook import removed_apis

_MISSING = re.compile(
    r"module '(?P<module>torch_xla[\w.]*)' has no attribute '(?P<name>\w+)'"
    r"|cannot import name '(?P<imported>\w+)' from '(?P<source>torch_xla[\w.]*)'"
    r"|No module named '(?P<lost>torch_xla\w*\.[\w.]+)'"
)
_ALIKE = 0.7
"""Smallest similarity of a misspelt name and the right one."""
_OTHER = "the library that the message is about"
"""For `{other}` in a fix, if the message does not name it."""
_OWN = "the packages that it needs"
"""For `{other}`, if it is the library that makes the call."""


def texts(
    rule: FailureRule, error: LoggedException | None, log: Log, facts: Facts
) -> tuple[str, tuple[str, ...]]:
    """Return the cause and the steps of the fix for a rule; `error`: in which it matched."""
    message = log.body(error.line) if error is not None else ""
    other = named_in(message, rule.signs).get("other", _OTHER)
    cause = rule.cause
    steps = rule.steps(facts.platform, facts.backend)
    steps = tuple(step.replace("{other}", other) for step in steps)
    named = explain_name(message)
    if named is not None:
        cause, steps = named[0], (named[1],)
    origin = Origin.of(log, error) if error is not None else None
    library = origin.caller.library if origin is not None else None
    if origin is None or library is None or not rule.library:
        return cause, steps
    version = version_of(library, log, here=facts.here)
    full = f"{library} {version}" if version else library
    cause = f"{cause} {full} makes the call ({origin.caller}), not your code."
    mended = rule.mended.get(library)
    fix = f"Upgrade {library} to {mended} or later." if mended else rule.library
    other = _OWN if other == library else other
    return cause, (fix.replace("{library}", library).replace("{other}", other),)


def explain_name(message: str) -> tuple[str, str] | None:
    """Return the cause and the fix if an error is about a name that torch_xla does not have.

    A misspelt name is compared with those of the installed torch_xla, which is not imported.
    """
    match = _MISSING.search(message)
    if match is None:
        return None
    module, name = match["module"] or match["source"], match["name"] or match["imported"]
    full = match["lost"] or f"{module}.{name}"
    old = removed_apis.lookup_name(full)
    if old is not None and old.state in ("missing", "restored"):
        return f"torch_xla no longer has `{full}`.", old.advice
    if module is None:
        return None
    known = names_of(module)
    if name in known:  # the log is of another release than the installed one
        return None
    if close := difflib.get_close_matches(name, sorted(known), 1, _ALIKE):
        return (
            f"`{module}` has no `{name}`. Did you mean `{close[0]}`?",
            f"Write `{module}.{close[0]}`.",
        )
    return None


@functools.cache
def names_of(module: str) -> frozenset[str]:
    """The public names of a module of the installed torch_xla, read from its source."""
    top, *parts = module.split(".")
    spec = importlib.util.find_spec(top)  # does not import it
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    folder = Path(spec.submodule_search_locations[0])
    return frozenset(name for name in _public(folder.joinpath(*parts)) if not name.startswith("_"))


def _public(path: Path) -> set[str]:
    """The names that the module at this path, without its suffix, binds."""
    package = path / "__init__.py"
    file = package if package.exists() else path.with_suffix(".py")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return set()
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Import):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.names[0].name != "*":
                names.update(alias.asname or alias.name for alias in node.names)
            elif node.level == 1 and node.module:
                names |= _public(file.parent.joinpath(*node.module.split(".")))
    return names
