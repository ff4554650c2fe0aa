"""What a run takes from the kernel, without processes: cells are executed in two namespaces."""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drivers.edited_notebook import Notebook, notebook
from tests.support import examples
from tpunb.kernel.taken import TakenValues
from tpunb.utils.literals import literal
from tpunb.utils.names_read import names_read

NAMES = "abc"
NUMBERS = st.one_of(
    st.integers(-3, 3), st.sampled_from([0.5, float("nan"), True, None, "x", 1 << 70])
)
PLAIN = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("kl"), inner, max_size=2)
    ),
    max_leaves=3,
)
NAME = st.sampled_from(NAMES)
VALUE = PLAIN.map(literal)
STATEMENTS = st.one_of(
    st.builds("{} = {}".format, NAME, VALUE),
    st.builds("{} = {}".format, NAME, VALUE),
    st.builds("{} = {}".format, NAME, NAME),
    st.builds("{} = [{}, {}]".format, NAME, NAME, VALUE),
    st.builds("{} = str({})".format, NAME, NAME),
    st.builds("{} += {}".format, NAME, NUMBERS.map(literal)),
    st.builds("{}.append({})".format, NAME, VALUE),
    st.builds("{}['k'] = {}".format, NAME, VALUE),
    st.builds("{} = {{'k': {}, 'f': print}}".format, NAME, VALUE),
    st.builds("for {} in [{}, {}]: pass".format, NAME, VALUE, VALUE),
    st.builds("def f():\n    return {}".format, NAME),
    st.builds("{} = f()".format, NAME),
    st.builds("def g():\n    global {0}\n    {0} = {1}".format, NAME, VALUE),
    st.just("g()"),
    st.just("del c"),
)
CELLS = [f"cell {index}" for index in range(5)]
STEPS = st.lists(
    st.tuples(st.sampled_from(CELLS), st.one_of(st.none(), STATEMENTS)), min_size=1, max_size=12
)


def plain_state(value: object) -> object:
    """A value with its plain parts as texts."""
    if isinstance(value, dict):
        return {key: plain_state(item) for key, item in value.items()}
    return literal(value)


@settings(max_examples=examples(100))
@given(steps=STEPS, below=st.frozensets(st.sampled_from(CELLS), max_size=2))
def test_ranks_get_plain_kernel_values_after_any_edits(
    steps: Sequence[tuple[str, str | None]], below: frozenset[str]
) -> None:
    """For any sequence of executing and editing cells, also below the train cell."""
    made = Notebook("print(a, b, c)", dict.fromkeys(CELLS, ""), below)
    made.kernel |= {"a": 0, "b": [1], "c": {"k": 2}}
    made.run("first", "a, b, c = 0, [1], {'k': 2}")
    made.cells = {"first": made.cells.pop("first"), **made.cells}
    for name, source in steps:
        if source is not None or name in made.numbers:
            made.run(name, source)
    try:
        taken, namespace = made.start()
    except (ArithmeticError, LookupError, TypeError, AttributeError, NameError):
        return  # the cells do not run in the order in which they stand, and the run says so
    for name in NAMES:
        if name in made.kernel:
            wanted, here = made.kernel[name], namespace.get(name)
            told = name not in namespace or any(kept.startswith(name) for kept in taken.left)
            same = plain_state(here) == plain_state(wanted)
            assert same or (told and literal(wanted) is None), (name, taken)


def lines(taken: TakenValues) -> list[str]:
    return list(taken.lines())


class TestWhatIsTaken:
    def test_kernel_value_changed_by_a_cell_below_is_taken(self) -> None:
        made = notebook("print(lr)", "lr = 0.01", "lr = 0.1")
        made.below = frozenset({"2"})
        taken, namespace = made.start()
        assert namespace["lr"] == 0.1
        assert lines(taken) == ["lr: 0.1 from the kernel; cell [1] sets 0.01"]
        assert taken.parameters == {"lr": 0.1}

    def test_kernel_value_that_no_cell_makes_is_taken(self) -> None:
        made = notebook("print(lr)", "x = 1")
        made.kernel["lr"] = 0.1
        taken, namespace = made.start()
        assert namespace["lr"] == 0.1
        assert lines(taken) == ["lr: 0.1 from the kernel; no cell in this run defines it"]

    def test_kernel_values_read_by_functions_and_methods_are_taken(self) -> None:
        made = notebook(
            "f()\nmodel",
            "a = b = c = d = 1",
            "def f():\n    return g\ndef g():\n    return a\nclass M:\n    def forward(self):\n"
            "        return b\ndef build():\n    return M()\nmodel = build()\nh = lambda: c",
        )
        made.run("3", "a, b, c, d = 2, 2, 2, 2")
        made.below = frozenset({"3"})
        taken, namespace = made.start()
        assert taken.parameters == {"a": 2, "b": 2}
        assert (namespace["c"], namespace["d"]) == (1, 1)

    def test_names_bound_by_the_train_cell_are_not_taken(self) -> None:
        made = notebook(
            """
            for a in range(3):
                b = a
            c = d if a else b
            def f():
                return e + [g for g in "x"]
            e = 1
            with open(c) as h:
                h.read()
            e, f(), (lambda i: i)(1)
            """,
            "a = b = c = d = e = g = h = i = 1",
        )
        made.run("2", "a = b = c = d = e = g = h = i = 2")
        made.below = frozenset({"2"})
        taken, _ = made.start()
        assert taken.parameters == {"d": 2, "b": 2}  # the loop may have no rounds

    def test_kernel_settings_inside_objects_are_taken(self) -> None:
        made = notebook(
            "print(config, CFG, args, point, old, state)",
            """
            import argparse, dataclasses
            config = {"lr": 1, "model": print, "opt": {"wd": 0, "gone": 1}}
            class CFG:
                drop = 0.1
                def f(self):
                    return 1
            args = argparse.Namespace(steps=5)
            @dataclasses.dataclass(frozen=True)
            class Point:
                x: int = 1
            point = Point()
            class Old:
                def __init__(self):
                    self.x = 1
            old = Old()
            state = {1: 2}
            """,
        )
        held = made.kernel["config"], made.kernel["old"]
        made.run(
            "2",
            """
            config["lr"] = 2; config["opt"]["wd"] = 0.5; config["opt"]["new"] = [1]
            del config["opt"]["gone"]
            CFG.drop = 0.7; args.steps = 6; point = Point(3); old.x = 9; state = {1: 3}
            """,
        )
        made.below = frozenset({"2"})
        taken, namespace = made.start()
        assert held[0] is made.kernel["config"]
        config = namespace["config"]
        assert config == {"lr": 2, "model": print, "opt": {"wd": 0.5, "new": [1]}}
        assert namespace["CFG"].drop == 0.7
        assert namespace["args"].steps == 6
        assert namespace["point"].x == 3
        assert isinstance(namespace["point"], namespace["Point"])
        assert namespace["old"].x == 9
        assert namespace["state"] == {1: 3}
        assert taken.parameters == {
            **{"config.lr": 2, "config.opt.wd": 0.5, "config.opt.new": "[1]", "CFG.drop": 0.7},
            **{"args.steps": 6, "point.x": 3, "old.x": 9, "state": "{1: 3}"},
        }
        assert "config['lr']: 2 from the kernel; cell [1] sets 1" in [n for _, n in taken.notes]
        assert lines(taken)[-1].startswith("from the kernel as well: ")

    def test_scalars_of_numpy_and_torch_keep_their_types(self) -> None:
        made = notebook("print(a, b, c)", "a = b = c = 1")
        made.run(
            "2",
            "import numpy, torch\na = numpy.float32(0.1)\nb = torch.tensor(0.5)\n"
            "c = torch.bfloat16",
        )
        made.below = frozenset({"2"})
        taken, namespace = made.start()
        assert type(namespace["a"]).__name__ == "float32"
        assert torch.equal(namespace["b"], torch.tensor(0.5))
        assert namespace["c"] is torch.bfloat16
        assert taken.parameters["b"] == 0.5
        assert taken.notes[0][1].startswith("a: numpy.float32(0.1")

    def test_a_value_made_from_a_changed_one_is_taken_too(self) -> None:
        made = notebook("print(lr, opt)", "lr = 0.01", "opt = [lr]", "lr = 0.1")
        made.below = frozenset({"3"})
        assert lines(made.start()[0]) == ["lr: 0.1 from the kernel; cell [1] sets 0.01"]
        made.run("2")  # in the kernel with 0.1, in the run with 0.01
        taken, namespace = made.start()
        assert namespace["opt"] == [0.1]
        assert lines(taken)[1] == "opt: [0.1] from the kernel; cell [2] sets [0.01]"

    def test_names_of_one_object_stay_names_of_one_object(self) -> None:
        made = notebook("xs, ys, zs, d, e", "xs = [1]; ys = xs; zs = []; d = {'a': 1}; e = d")
        made.run_below("xs.append(2); zs = ws = [5]; d['b'] = 2")
        made.train += "; ws"
        _, ranks = made.start()
        assert (ranks["xs"], ranks["zs"], ranks["d"]) == ([1, 2], [5], {"a": 1, "b": 2})
        assert ranks["ys"] is ranks["xs"]
        assert ranks["e"] is ranks["d"]
        assert ranks["zs"] is ranks["ws"]

    def test_environment_variables_and_settings_of_torch(self) -> None:
        made = notebook("print()", "import os, torch; os.environ['SOME'] = 'a'")
        try:
            made.run_below("os.environ['SOME'] = 'b'; torch.set_default_dtype(torch.float64)")
            assert made.taken().statements == [
                "__import__(\"os\").environ['SOME'] = 'b'",
                '__import__("torch").set_default_dtype(__import__("torch").float64)',
            ]
            made.run_below("os.environ['SOME_TOKEN'] = 'hf'; del os.environ['SOME']")
            assert made.taken().left == ["os.environ['SOME'] (deleted; cell [1] defines it)"]
        finally:
            torch.set_default_dtype(torch.float32)
            os.environ.pop("SOME_TOKEN", None)


@pytest.mark.parametrize(
    "source", ["return lr", "print(lr)\nbreak", "yield lr", "1 +", "%%bash\nls"]
)
def test_a_cell_that_is_no_python(source: str) -> None:
    made = notebook("lr", "lr = 1")
    assert not made.run("2", source)
    assert made.taken().statements == []
    assert names_read(ast.parse("lr\nreturn other"), made.kernel) == ["lr"]


LEFT = "changes in the kernel that this run does not have: "


def test_object_with_two_names_is_not_changed_under_one() -> None:
    made = notebook("print(a, c)", "c = {'k': 2}", "a = {'k': [], 'f': print}", "a = c")
    made.run("2")  # in the kernel two objects again, in the run one
    taken, namespace = made.start()
    assert (namespace["a"], namespace["c"]) == ({"k": []}, {"k": 2})
    assert taken.left == ["a['f'] (cell [4])"]


class TestWhatIsNotTaken:
    def test_values_of_a_process_are_not_taken(self) -> None:
        """The order of a set, the rank, the time: the same cells made them from the same."""
        made = notebook(
            "print(classes, y, rank, stamp, noise)",
            """
            import os, time, torch
            names = ['b', 'a']
            """,
            "classes = list(set(names))",
            """
            y = torch.tensor([classes.index(x) for x in 'ab'])
            rank = int(os.environ.get('RANK', 7))
            stamp = time.time()
            noise = torch.rand(3)
            """,
        )
        made.run("1")
        made.run("3", made.cells["3"] + "  # edited")
        taken, namespace = made.start()
        assert taken.statements == taken.left == []
        assert namespace["stamp"] != made.kernel["stamp"]

    def test_changed_tensors_and_models_are_noted_in_one_line(self) -> None:
        made = notebook(
            "print(x, model, table, same)",
            """
            import pandas, torch
            x, same = torch.zeros(3), torch.ones(3)
            model = torch.nn.Linear(2, 2)
            table = pandas.DataFrame({"a": [1, 2], "b": ["x", "y"]})
            """,
        )
        made.run_below("x += 1; table.loc[0, 'b'] = 'z'")
        made.run_below("with torch.no_grad():\n    model.bias += 1")
        taken, _ = made.start()
        assert taken.statements == []
        assert lines(taken) == [
            f"{LEFT}x (cell [2]), model (cell [3]), "
            "table (cell [2]). To include one, make it in a cell above, return it "
            "from a run with --returns, or pass it to tpunb.launch"
        ]

    def test_what_was_made_from_other_values(self) -> None:
        made = notebook("model", "import torch\nwidth = 2", "model = torch.nn.Linear(width, 2)")
        made.run("1", "import torch\nwidth = 3")
        assert made.taken().left == ["model (cell [2] made it with another width)"]
        made.run("2")
        assert made.taken().left == []
        made.run("1", "import torch  # and nothing else\nwidth = 3")
        assert made.taken().left == []

    def test_secrets_are_not_taken(self) -> None:
        made = notebook("print(api_key, url)", "api_key = 'old'\nurl = 'https://a'")
        made.run_below("api_key = 'new-one'; url = 'https://me:pass@host'")
        taken, namespace = made.start()
        assert namespace["api_key"] == "old"
        [line] = lines(taken)
        assert "api_key (what may be a secret is not taken over)" in line
        assert "new-one" not in line
        assert "pass@" not in line

    def test_a_deleted_name_is_named(self) -> None:
        made = notebook("print(lr)", "lr = 1")
        made.run_below("del lr")
        assert made.taken().left == ["lr (deleted; cell [1] defines it)"]


class Hostile:
    """An object of which every use raises."""

    def _raise(self, *args: object, **kwargs: object) -> Any:
        raise SystemExit("code of a user's class ran")

    __eq__ = __hash__ = __repr__ = __str__ = __bool__ = __len__ = __iter__ = _raise
    __reduce_ex__ = __getattr__ = __getattribute__ = __float__ = __array__ = _raise


class HostileMeta(type):
    def __eq__(cls, other: object) -> bool:
        raise SystemExit("code of a user's class ran")

    __hash__ = __instancecheck__ = __subclasscheck__ = __getattribute__ = __eq__  # type: ignore[assignment]


@pytest.mark.parametrize("kind", ["Hostile", "Meta", "Text", "Items", "Number"])
def test_comparison_runs_no_code_of_user_classes(kind: str) -> None:
    class Text(str):
        __eq__ = __hash__ = __repr__ = __str__ = __len__ = Hostile._raise

    class Items(dict):  # type: ignore[type-arg]
        __eq__ = __iter__ = __repr__ = __len__ = __getitem__ = Hostile._raise
        items = keys = values = Hostile._raise

    class Number(float):
        __eq__ = __hash__ = __repr__ = __bool__ = __abs__ = Hostile._raise

    meta: Any = HostileMeta("Meta", (), {})
    value = {"Hostile": Hostile, "Text": Text, "Items": Items, "Number": Number}.get(kind, meta)()
    for held in (value, [value], {"a": value}, {"b": [value], "c": 1}):
        made = notebook("print(x)", "x = 1")
        made.kernel["x"] = held
        try:
            taken, namespace = made.start()
        except SystemExit as error:  # pytest would show the values, and so run their code
            raise AssertionError(f"{error}: {kind}") from None
        assert namespace["x"] == 1
        assert taken.statements == []


IMPORTS = """
import collections, dataclasses, datetime, enum, functools, pathlib, re, types
import numpy as np, pandas as pd, torch
from torch import nn
"""
KINDS = {
    "attribute": ("class C: ...\nc = C(); c.f = print", "c.lr = .5"),
    "list of dataclasses": (
        "@dataclasses.dataclass\nclass C:\n    a: int = 1\nc = [C(), C()]",
        "c[1].a = 5",
    ),
    "learning rate": (
        "m = nn.Linear(2, 2); c = torch.optim.SGD(m.parameters(), lr=.1)",
        "c.param_groups[0]['lr'] = .5",
    ),
    "frozen parameters": ("c = nn.Linear(2, 2)", "c.requires_grad_(False)"),
    "layer": ("c = nn.Sequential(nn.Linear(2, 2), nn.ReLU())", "c[1] = nn.GELU()"),
    "weights of the user's model": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.inner = nn.Linear(2, 2); self.me = [self]\nc = Net()",
        "c.inner.weight.data.zero_()",
    ),
    "a step": (
        "m = c = nn.Linear(99, 99); opt = torch.optim.SGD(m.parameters(), lr=.1)",
        "m(torch.ones(1, 99)).sum().backward(); opt.step()",
    ),
    "loader": (
        "c = torch.utils.data.DataLoader([*range(9)], batch_size=2)",
        "c = torch.utils.data.DataLoader([*range(9)], batch_size=5)",
    ),
    "dataset": (
        "class D(torch.utils.data.Dataset):\n    n = 3\nc = D()",
        "c.n = 4",
    ),
    "function": ("def c(x): return x * 2", "def c(x): return x * 3"),
    "class": (
        "class c:\n    def f(self): return 1",
        "class c:\n    def f(self): return 2",
    ),
    "partial": ("c = functools.partial(print, 1)", "c = functools.partial(print, 2)"),
    "closure": (
        "def make():\n    n = [0]\n    def c(): return n\n    return c\nc = make()",
        "c().append(3)",
    ),
    "slots": (
        "@dataclasses.dataclass(slots=True)\nclass C:\n    a: int = 1\nc = C()",
        "c.a = 2",
    ),
    "attribute of a base class": ("class B: a = 1\nclass C(B): ...\nc = C()", "B.a = 2"),
    "mode": ("c = nn.Dropout(.1)", "c.eval()"),
    "defaults": ("def c(x=1): return x", "c.__defaults__ = (2,)"),
    "deque": ("c = collections.deque([1])", "c.append(2)"),
    "path": ("c = pathlib.PurePath('a')", "c = pathlib.PurePath('b')"),
    "Timestamp": ("c = pd.Timestamp('2020')", "c = pd.Timestamp('2021')"),
    "date": ("c = datetime.date(2020, 1, 1)", "c = datetime.date(2020, 1, 2)"),
    "slice": ("c = slice(1)", "c = slice(2)"),
    "Index": ("c = pd.Index([1, 2])", "c = pd.Index([1, 3])"),
    "category": ("c = pd.Series([1, 2], dtype='category')", "c[0] = 2"),
    "bfloat16": ("c = torch.zeros(10, dtype=torch.bfloat16)", "c[3] = 1"),
    "defaultdict": ("c = collections.defaultdict(list)", "c['a'].append(1)"),
    "namedtuple": ("P = collections.namedtuple('P', 'x y')\nc = P(1, 2)", "c = P(1, 3)"),
    "Enum": ("class E(enum.Enum):\n    A = 1\n    B = 2\nc = E.A", "c = E.B"),
    "device": ("c = torch.device('cpu')", "c = torch.device('meta')"),
    "pattern": ("c = re.compile('a')", "c = re.compile('b')"),
    "dict with numbers as keys": ("c = {1: 2, 'a': [1, print]}", "c['a'][0] = 2"),
    "array of objects": ("c = np.array([1, 'a', None], dtype=object)", "c[0] = 2"),
    "field of a table": ("c = pd.DataFrame({'a': [1, 2], 'b': ['x', 'y']})", "c.loc[0, 'b'] = 'z'"),
    "long set": ("c = set(range(5000))", "c.remove(77); c.add(9999)"),
    "very long list": ("c = [{'a': k} for k in range(200_000)]", "c[123_456] = {}"),
    "a small change in an array": ("c = np.linspace(0, 1, 100_000)", "c[55_555] += 1e-9"),
    "tensor": ("c = torch.zeros(1_000_000)", "c[3] = 1"),
    "namespace": ("c = types.SimpleNamespace(a=1, b=print)", "c.a = 2"),
    "what contains itself": ("c = []; c.append(c)", "c.append(1)"),
    "name in a query": ("thr = 1; df = pd.DataFrame({'x': [1, 2, 3]})", "thr = 2"),
    "name in eval": ("lr = 1", "lr = 2"),
}
TRAINS = {
    "name in a query": "df.query('x > @thr')",
    "name in eval": "eval('lr'), globals()['lr']",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_each_kind_of_value_is_taken_or_named(kind: str) -> None:
    above, below = KINDS[kind]
    made = notebook(TRAINS.get(kind, "c"), f"{IMPORTS}\n{above}")
    untouched = made.taken()
    assert (untouched.statements, untouched.left) == ([], [])
    made.run_below(below)
    taken = made.taken()
    assert taken.statements or taken.left
    assert all("cell [2]" in left for left in taken.left)
    made.run("1")
    again = made.taken()
    assert (again.statements, again.left) == ([], [])


def test_modules_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "own_settings.py"
    file.write_text("LR = .1\nclass C:\n    a = 1\ndef f(): return LR\n")
    made = notebook("m.f(), c", "import own_settings as m\nc = m.C()")
    made.run_below("m.LR = .5; c.a = 2")
    taken = made.taken()
    assert taken.statements == ["m.LR = 0.5", "c.a = 2"]
    assert taken.files == []
    file.write_text("LR = .2\nclass C:\n    a = 1\ndef f(): return 2 * LR\n")
    taken = made.taken()
    assert taken.files == [str(file)]
    assert f"{file} was edited since the kernel imported it" in lines(taken)[-1]
    made.run_below("import importlib; importlib.reload(m)")
    assert made.taken().files == []


NAMED_ALIKE = """
import dataclasses
@dataclasses.dataclass(frozen=True)
class Config:
    lr: float = 1
    lr_min: float = 1
    net: object = print
class Items(dict): ...
conf, items = Config(), Items(a=1)
"""


def test_settings_of_another_object_whose_names_begin_alike() -> None:
    made = notebook("conf, items", NAMED_ALIKE)
    held = made.kernel["conf"]
    made.run_below("conf, items = Config(1, 2), Items(a=2)")
    taken, ranks = made.start()
    assert (ranks["conf"].lr, ranks["conf"].lr_min) == (1, 2)
    assert taken.left == ["items (cell [2])"]
    made.run_below("conf = Config(1, 2, len)")
    assert made.taken().left == ["conf.net (cell [3])", "items (cell [2])"]
    assert (held.lr, held.lr_min) == (1, 1)
