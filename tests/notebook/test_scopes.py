"""What cells bind, change and read, what certainly runs in them, and what calls reach."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from tpunb.notebook.scopes import (
    KnownCells,
    ParsedCell,
    Scope,
    Scopes,
    bound_names,
    changed_names,
    dotted,
)


def scopes_of(*cells: str) -> Scopes:
    return Scopes(ParsedCell(at, ast.parse(dedent(cell))) for at, cell in enumerate(cells))


def scope(scopes: Scopes, name: str) -> Scope:
    [function] = scopes.by_name[name]
    return function.scope


BOUND = {
    "a = b = 1\nc, (d, *e) = f": "a b c d e",
    "a.b = 1\nc[0] = 2": "",
    "a += 1\na = 2": "a",
    "a: int\nb: int = 1": "a b",
    "import a, b.c, d.e as f\nfrom g import h, i as j\nfrom k import *": "a b f h j",
    "def f(a, *b, c=1, **d): e = 1": "f",
    "class A(B, c=d):\n    e = 1\n    def f(self): ...": "A",
    "for a in b: c = 1\nwith d as (e, f): ...": "a c e f",
    "try: ...\nexcept A as b: c = 1": "b c",
    "match a:\n case [b, *c]: ...\n case {'k': d, **e}: ...\n case f.g | h(i=j) as k: ...": (
        "b c d e j k"
    ),
    "[a for b in c if (d := b)]\nlambda e: (f := e)": "d",
    "def f():\n global a\n a = 1\n def g():\n  global b, c\n  import b": "a b f",
}


@pytest.mark.parametrize(("source", "names"), BOUND.items())
def test_what_a_cell_binds(source: str, names: str) -> None:
    assert bound_names(ast.parse(source)) == set(names.split())


CHANGED = {
    "a = 1\nb, c = 2, 3": "a b c",
    "a['k'] = 1\nb.c.d = 2\ndel e[0]": "a b e",
    "a.load_state_dict(x)": "a",
    "a.b.fill_(0)\nc.items.append(1)": "a c",
    "df.drop(columns='a', inplace=True)": "df",
    "df.drop(columns='a', inplace=False)\ndf.head()": "",
    "def f():\n    a.append(1)\n    b = 1": "f",
    "_ = 1\nx.__init__()": "",
}


@pytest.mark.parametrize(("source", "names"), CHANGED.items())
def test_what_a_cell_changes(source: str, names: str) -> None:
    assert changed_names(ast.parse(source)) == set(names.split())


def test_names_that_nothing_binds_or_only_code_below() -> None:
    scopes = scopes_of(
        "print(a, b)\nc += 1\ndef f(d):\n    return a, d, e, [g for g in d if h]",
        "a = 1\ndef k():\n    global e\n    e = 2\nclass A:\n    m = 1\n    def n(self): return m",
        "[\n    o for p in '1'\n    if (o := 2)\n]",
    )
    unbound = {(*site.place, site.node.id): len(found) for site, found in scopes.unbound()}  # type: ignore[attr-defined]
    assert unbound == {
        **{(0, 1, "print"): 0, (0, 1, "a"): 1, (0, 1, "b"): 0, (0, 2, "c"): 0},
        **{(0, 4, "h"): 0, (1, 7, "m"): 0},
    }


def test_scopes_and_parents_of_nodes() -> None:
    scopes = scopes_of("import a.b as c\ndef f():\n    return c.d(1)")
    [call] = scopes.calls
    assert isinstance(call.node, ast.Call)
    assert isinstance(scopes.parents[call.node], ast.Return)
    assert scopes.scopes[call.node] is scopes.scopes[call.node.func] is scope(scopes, "f")
    [binding] = scopes.bindings("c", call.scope)
    assert (binding.full, scopes.scopes[binding.node]) == ("a.b", scopes.globals)


FULL = {
    "import a.b as c\nc.f()": ("a.b.f", True),
    "from a.b import c as d\nd()": ("a.b.c", True),
    "from a import c\nfrom b import c\nc()": ("b.c", False),
    "from a import c\ndef c(): ...\nc()": ("a.c", False),
    "def f(c):\n    c.d()\nimport c": ("", False),
    "def f():\n    import a as c\n    c.d()\nc = 1": ("a.d", True),
    "def f():\n    global c\n    import a as c\nc.d()": ("a.d", True),
    "open('x')": ("open", True),
    "from a import *\nopen('x')": ("open", False),
    "open = print\nopen('x')": ("", False),
    "a[0].b()": ("", False),
}


@pytest.mark.parametrize(("source", "expected"), FULL.items(), ids=FULL)
def test_full_names(source: str, expected: tuple[str, bool]) -> None:
    scopes = scopes_of(source)
    [call] = [site for site in scopes.calls if isinstance(site.node, ast.Call)]
    assert (
        scopes.full(call.node.func, call.scope),
        scopes.is_certain(call.node.func, call.scope),
    ) == (expected)


def test_a_name_that_no_cell_binds_as_it_is_written() -> None:
    scopes = scopes_of("a.b()", "c = 1\nc.d()")
    written = [scopes.full_or_written(s.node.func, s.scope) for s in scopes.calls]  # type: ignore[attr-defined]
    assert written == ["a.b", ""]


RUNS = """
sure()
if a: no()
if __name__ == '__main__': sure()
no_body(lambda: lambda_body())
b and no() or no()
no() if sure() else no()
assert sure(), no()
for i in sure(): sure()
while sure(): sure()
else: no()
[no() for x in sure() if sure() if no()]
[sure() for x in sure() for y in sure()]
class A(sure()):
    b = sure()
match sure():
    case 1: no()
with sure(): sure()
with suppress(sure()): caught()
try: caught()
except sure: no()
else: no()
finally: sure()
try: sure()
finally: sure()
for i in x:
    sure()
    if y: break
    no()
while sure():
    for i in x: break
    sure()
def f():
    sure()
    if x: raise y
    caught()
    if x: return sure()
    no()
"""


def test_what_certainly_runs_and_what_certainly_fails() -> None:
    scopes = scopes_of(RUNS.replace("lambda: lambda_body()", "sure"))
    for site in scopes.calls:
        assert isinstance(site.node, ast.Call)
        name = dotted(site.node.func)
        if name in ("sure", "no", "caught"):
            inner = site.line == RUNS[: RUNS.index("return sure")].count("\n") + 1
            assert site.runs() is (name != "no" and not inner), site.line
            assert site.fails() is (name == "sure" and not inner), site.line


def test_calls_reach_functions_by_name() -> None:
    scopes = scopes_of(
        """
        import torch_xla
        from functools import partial
        def f(): ...
        class A:
            def f(self): ...
        f()
        A().f()
        torch_xla.launch(f)
        torch_xla.launch(fn=partial(f, 1))
        """
    )
    reached = {
        dotted(site.node.func) or site.line: [f.node.lineno for f in scopes.called(site)]  # type: ignore[attr-defined]
        for site in scopes.calls
    }
    assert reached["f"] == [4]
    assert reached[8] == [6]
    assert reached["torch_xla.launch"] == [4, 6]


def seen(scopes: Scopes) -> list[object]:
    """What readers ask scopes for, with the cell and the line that each has."""
    names = "a b f x".split()
    bound = {n: [o.frame.cell.index for o in scopes.globals.bindings.get(n, ())] for n in names}
    loads = {
        n: [(s.place, s.scope.find(n) is scopes.globals) for s in scopes.loads(n)] for n in names
    }
    unbound = [(site.place, len(below)) for site, below in scopes.unbound()]
    functions = [(f.name, f.outer.cell.number, len(f.sites)) for f in scopes.functions]
    reached = [[site.place for site in scopes.executed(cell)] for cell in scopes.cells]
    return [
        bound,
        loads,
        sorted(unbound),
        functions,
        reached,
        list(map(scopes.bound, scopes.cells)),
    ]


def test_cells_that_are_known_are_read_as_those_that_are_new() -> None:
    known = KnownCells()
    one, other = "a = 1", "def f(x):\n    global b\n    b = a\n    return print(x)"
    read: list[ParsedCell] = []
    for cells in (
        [one, other, "f(a)"],
        [one, other, "f(b)"],  # the last was edited
        [one, "f(a)", other, "f(b)"],  # a cell is back, at another place
        [one, one, "a += 1", other, other, one],  # the same text more than once
        [one, "a += 1", other],
        [other, "from a import *"],
        [one, other, "f(a)"],
    ):
        known.begin()
        texts = [(text, at, at + 7, text.split("\n")) for at, text in enumerate(cells)]
        read = [known.parse(*text) for text in texts]
        plain = [ParsedCell(at, ast.parse(text), number) for text, at, number, _ in texts]
        assert seen(known.scopes(read)) == seen(Scopes(plain))
        assert seen(known.scopes(read[1:])) == seen(Scopes(plain[1:]))
    again = known.parse(other, 0, 0, [])
    assert again is not read[1], "the second cell with its text has nodes of its own"
    for _ in range(20):
        known.begin()
    assert known.parse(one, 0, 0, []) is not read[0], "what is no longer used is not kept"
