"""Which global names a cell reads, also in the functions and methods that it may call.

Found in compiled code and in living objects, not in texts: a function is followed wherever it was
defined, and a name is not taken for an attribute. No code of the user's runs.
"""

from __future__ import annotations

import ast
import dis
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from tpunb.utils.modules import is_own_module, loaded, own_attributes

_BY_TEXT = frozenset("eval exec globals locals vars query assign filter get_ipython".split())
"""Code that uses one of these may name variables in a text."""
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Assert)
_WORD = re.compile(r"[^\W\d]\w*")
_MOST_OBJECTS = 2000
_MOST_ITEMS = 100


def names_read(tree: ast.Module, namespace: Mapping[str, Any]) -> list[str]:
    """Return the names that a cell may read before it binds them, in the order of first use.

    Only names in the namespace lead on to functions; names that are not in it are returned too.
    """
    found, _ = _reached(tree, namespace)
    return found


def names_set_by_functions(tree: ast.Module, namespace: Mapping[str, Any]) -> set[str]:
    """Return the global names that functions bind which a cell may call."""
    _, codes = _reached(tree, namespace)
    return {
        str(step.argval)
        for code in codes
        for step in dis.get_instructions(code)
        if step.opname == "STORE_GLOBAL"
    }


def _reached(tree: ast.Module, namespace: Mapping[str, Any]) -> tuple[list[str], list[CodeType]]:
    """Return the names that a cell reads, and the code of the functions that it reads them in."""
    found: dict[str, None] = {}
    later: dict[str, None] = {}
    bound: set[str] = set()
    _read(tree.body, found, later, bound)
    found |= {name: None for name in later if name not in bound}
    todo, seen, codes = list(found), set[int](), list[CodeType]()
    while todo:
        name = todo.pop(0)
        if name not in namespace:
            continue
        for code in _codes(namespace[name], seen):
            codes.append(code)
            for inner in _globals(code):
                if inner not in found and inner not in bound:
                    found[inner] = None
                    todo.append(inner)
    return list(found), codes


def names_stored(tree: ast.Module) -> set[str]:
    """Return the names that a cell's own statements bind, in contrast to its functions'."""
    return set().union(*(_first_uses(_compiled(node))[2] for node in tree.body))


def _read(
    body: Iterable[ast.stmt], found: dict[str, None], later: dict[str, None], bound: set[str]
) -> None:
    """Add the names that statements read, at once and in functions that they define.

    `bound` is extended by the names that they bind in any case.
    """
    for node in body:
        if isinstance(node, ast.With | ast.AsyncWith):
            heads: list[ast.expr] = []
            for item in node.items:
                heads.append(item.context_expr)
                bound |= _names_in(item.optional_vars)
            _read([ast.copy_location(ast.Expr(head), head) for head in heads], found, later, bound)
            _read(node.body, found, later, bound)
            continue
        now, inner, stored = _first_uses(_compiled(node))
        found.update((name, None) for name in now if name not in bound)
        later.update((name, None) for name in inner)
        if isinstance(node, ast.For | ast.AsyncFor):
            bound |= _names_in(node.target)
        elif isinstance(node, (*_SIMPLE, ast.Import, ast.ImportFrom)) or hasattr(node, "name"):
            bound |= stored


def _names_in(target: ast.AST | None) -> set[str]:
    nodes = () if target is None else ast.walk(target)
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _compiled(node: ast.stmt) -> CodeType:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = ast.Module([node], [])
    try:
        code: CodeType = compile(tree, "<cell>", "exec", flags=flags, dont_inherit=True)
    except SyntaxError:  # which parsing does not find: a `return` outside of a function
        code = compile("", "<cell>", "exec")
    return code


def _first_uses(code: CodeType) -> tuple[list[str], list[str], set[str]]:
    """Return the names that code reads first, those of its inner functions, those it stores."""
    now: list[str] = []
    stored: set[str] = set()
    for step in dis.get_instructions(code):
        name = str(step.argval)
        if step.opname in _STORES:
            stored.add(name)
        elif step.opname in _LOADS and name not in stored:
            now.append(name)
    inner = [name for part in _inner(code) for name in _globals(part)]
    return [*now, *_in_texts(code)], inner, stored


_LOADS = frozenset("LOAD_NAME LOAD_GLOBAL LOAD_FROM_DICT_OR_GLOBALS DELETE_NAME".split())
_STORES = frozenset("STORE_NAME STORE_GLOBAL".split())


def _inner(code: CodeType) -> Iterator[CodeType]:
    return (part for part in code.co_consts if isinstance(part, CodeType))


@lru_cache(maxsize=4096)
def _globals(code: CodeType) -> tuple[str, ...]:
    """Return the global names that a function's code reads, also in functions that it defines."""
    found = dict.fromkeys(
        str(step.argval) for step in dis.get_instructions(code) if step.opname in _LOADS
    )
    for part in _inner(code):
        found |= dict.fromkeys(_globals(part))
    return (*found, *_in_texts(code))


def _in_texts(code: CodeType) -> list[str]:
    """Return the words of code's texts, if it may use them as names."""
    if _BY_TEXT.isdisjoint(code.co_names):
        return []
    texts = [part for part in code.co_consts if isinstance(part, str)]
    return [word for text in texts for word in _WORD.findall(text)]


def _codes(value: object, seen: set[int]) -> Iterator[CodeType]:
    """Yield the code of the notebook's functions that can be reached from a value."""
    todo: list[Any] = [value]
    while todo and len(seen) < _MOST_OBJECTS:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        kind = type(each)
        if type(kind) is type and kind in _INSIDE:
            todo += _INSIDE[kind](each)
            if kind is FunctionType and each.__globals__.get("__name__") == "__main__":
                yield each.__code__
        elif issubclass(kind, type):
            todo += _of_class(each)
        else:
            todo += _of_object(each, kind)


def _in_closure(function: FunctionType) -> list[object]:
    found: list[object] = list(function.__dict__.values())
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # empty
            continue
    return found


_INSIDE: dict[type, Callable[[Any], Iterable[object]]] = {
    FunctionType: _in_closure,
    MethodType: lambda value: (value.__func__, value.__self__),
    partial: lambda value: (value.func, *value.args, *value.keywords.values()),
    property: lambda value: (value.fget, value.fset),
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    list: lambda value: value[:_MOST_ITEMS],
    tuple: lambda value: value[:_MOST_ITEMS],
    dict: lambda value: [*value.values()][:_MOST_ITEMS],
}


def _of_class(value: Any) -> list[object]:
    read = type.__getattribute__
    if not is_own_module(read(value, "__module__")):
        return []
    return [*read(value, "__dict__").values(), *read(value, "__mro__")[1:]]


def _of_object(value: object, kind: type) -> list[object]:
    """Return an object's class, and the objects inside it that may have methods of the notebook."""
    module = loaded("torch", "nn.Module")
    own = is_own_module(type.__getattribute__(kind, "__module__"))
    if not own and not (module is not None and issubclass(kind, module)):
        return []
    attributes = own_attributes(value) or {}
    return [kind, *[*attributes.values()][:_MOST_ITEMS]]
