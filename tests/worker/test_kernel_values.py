"""The kernel's plain values in a run, without processes: cells are executed in two namespaces."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import examples, script_of
from tpunb.kernel.plain_values import read_kernel
from tpunb.notebook.capture.history import Execution
from tpunb.notebook.convert.kernel_names import names_read
from tpunb.notebook.models import Cell, Script, Snapshot
from tpunb.runs.kernel_values import KernelValues
from tpunb.utils.literals import literal
from tpunb.worker.kernel_values import Taken, compare


@dataclass
class Notebook:
    """A kernel's namespace and history, and the cells above a train cell."""

    train: str
    cells: dict[str, str] = field(default_factory=dict)
    """The text that each cell ran last, by the cell's name, in the order of the notebook."""
    below: frozenset[str] = frozenset()
    """Cells below the train cell."""
    kernel: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    history: list[Execution] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def run(self, name: str, source: str | None = None) -> bool:
        """Execute a cell, maybe with a new text; True if it did not fail."""
        text = textwrap.dedent(self.cells[name] if source is None else source).strip()
        self.cells[name] = text
        number = len(self.history) + 1
        self.numbers[name] = number
        try:
            exec(compile(text, "<cell>", "exec"), self.kernel)
        except Exception:
            self.history.append(Execution(text, number, name, failed=True))
            return False
        self.history.append(Execution(text, number, name))
        return True

    def prepared(self) -> tuple[Script, KernelValues]:
        """The script and the kernel's values that a run of the train cell gets."""
        source = f"%%tpu_train\n{textwrap.dedent(self.train).strip()}"
        above = [name for name in self.cells if name not in self.below and name in self.numbers]
        below = [name for name in self.cells if name in self.below and name in self.numbers]
        texts = [*(self.cells[name] for name in above), source]
        texts += [self.cells[name] for name in below]
        cells = tuple(Cell(at, "code", text, at + 1) for at, text in enumerate(texts))
        snapshot = Snapshot(cells, len(above), None, "the test")
        script = script_of(texts[: len(above)], self.train)
        executions = [*self.history, Execution(source, len(self.history) + 1)]
        return script, read_kernel(names_read(script, snapshot, executions), self.kernel)

    def start(self, *, replicate: bool = False) -> tuple[Taken, dict[str, Any]]:
        """Run the prelude; return what is taken from the kernel, and the train cell's namespace."""
        script, values = self.prepared()
        namespace: dict[str, Any] = {"__name__": "__main__"}
        for block in script.blocks:
            if block.role == "prelude":
                exec(compile(script.source(block), "<script>", "exec"), namespace)
        taken = compare(values, namespace, replicate=replicate)
        exec("; ".join(taken.statements), namespace)
        return taken, namespace


def notebook(train: str, *cells: str) -> Notebook:
    made = Notebook(train)
    for number, cell in enumerate(cells, 1):
        assert made.run(str(number), cell)
    return made


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


@settings(max_examples=examples(400))
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
            told = name not in namespace or any(kept.startswith(name) for kept in taken.kept)
            same = plain_state(here) == plain_state(wanted)
            assert same or (told and literal(wanted) is None), (name, taken)


def lines(taken: Taken) -> list[str]:
    return list(taken.lines())


class TestWhatIsTaken:
    def test_kernel_value_changed_by_a_cell_below_is_taken(self) -> None:
        made = notebook("print(lr)", "lr = 0.01", "lr = 0.1")
        made.below = frozenset({"2"})
        taken, namespace = made.start()
        assert namespace["lr"] == 0.1
        assert lines(taken) == ["lr: 0.1 from the kernel; cell [1] makes 0.01"]
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
        assert "config['lr']: 2 from the kernel; cell [1] makes 1" in [n for _, n in taken.notes]
        assert lines(taken)[-1].startswith("from the kernel as well: ")

    def test_two_kernel_objects_that_share_one_object_in_the_run(self) -> None:
        made = notebook("print(a, b)", "a = b = {'k': 1, 'l': 2}", "a = {'k': 3}; b = {'k': 4}")
        made.below = frozenset({"2"})
        _, namespace = made.start()
        assert (namespace["a"], namespace["b"]) == ({"k": 3}, {"k": 4})

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


class TestWhatIsNotTaken:
    def test_values_that_later_cells_derive_from_are_not_taken(self) -> None:
        """The order of a set may differ between processes; the class numbers match this order."""
        made = notebook(
            "print(classes, y)",
            "order = ['b', 'a']",
            "classes = list(order)\nimport torch",
            "y = torch.tensor([classes.index(x) for x in 'ab'])",
        )
        # As if the same cells had given a different order in the kernel.
        made.kernel["classes"] = ["a", "b"]
        made.kernel["y"] = torch.tensor([0, 1])
        made.cells["1"] = made.cells["1"].replace("['b', 'a']", "sorted({'a', 'b'}, key=hash)")
        made.history[0] = Execution(made.cells["1"], 1, "1")
        script, values = made.prepared()
        assert script.text
        namespace = {"classes": ["b", "a"], "y": torch.tensor([1, 0])}
        taken = compare(values, namespace, replicate=False)
        assert taken.statements == []
        [line] = lines(taken)
        assert line == (
            "differs from the kernel, the run keeps the cells' value: classes = ['b', 'a'] "
            "(cell [2]; ['a', 'b'] in the kernel), y (cell [3])"
        )

    def test_rank_and_time_values_of_a_process_are_not_taken(self) -> None:
        made = notebook(
            "print(rank, stamp)",
            "import os, time\nrank = int(os.environ.get('RANK', 7))\nstamp = time.time()",
        )
        made.kernel["rank"] = 0
        stamp = made.kernel["stamp"]
        _, namespace = made.start()
        assert namespace["rank"] == 7
        assert namespace["stamp"] == stamp
        _, namespace = made.start(replicate=True)
        assert namespace["rank"] == 7
        assert namespace["stamp"] != stamp

    def test_changed_tensors_and_models_are_noted_in_one_line(self) -> None:
        made = notebook(
            "print(x, model, table, same)",
            """
            import pandas, torch
            x, same = torch.zeros(3), torch.ones(3)
            model = torch.nn.Linear(2, 2)
            torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
            table = pandas.DataFrame({"a": [1, 2], "b": ["x", "y"]})
            """,
            "x += 1; table.loc[0, 'b'] = 'z'\nwith torch.no_grad():\n    model.bias += 1",
        )
        made.below = frozenset({"2"})
        taken, _ = made.start()
        assert taken.statements == []
        assert lines(taken) == [
            "differs from the kernel, the run keeps the cells' value: x (cell [1]), "
            "model (cell [1]), table (cell [1])"
        ]

    def test_secrets_are_not_taken(self) -> None:
        made = notebook("print(api_key, url)", "api_key = 'old'\nurl = 'https://a'")
        made.run("2", "api_key = 'new-one'; url = 'https://me:pass@host'")
        made.below = frozenset({"2"})
        script, values = made.prepared()
        assert script.text
        written = str(values.to_json())
        assert "new-one" not in written
        assert "pass@" not in written
        taken, namespace = made.start()
        assert namespace["api_key"] == "old"
        [line] = lines(taken)
        assert "api_key" in line
        assert "what may be a secret is not taken over" in line
        assert "new-one" not in line

    def test_rounding_differences_are_not_taken(self) -> None:
        made = notebook("print(mean)", "import torch\nx = torch.ones(2) / 4\nmean = float(x.sum())")
        made.kernel["mean"] = 0.5 + 1e-9
        taken, namespace = made.start()
        assert namespace["mean"] == 0.5
        assert lines(taken) == []


def test_note_names_cells_that_used_the_old_value() -> None:
    made = notebook("print(lr, opt)", "lr = 0.01", "opt = [lr]", "lr = 0.1")
    made.below = frozenset({"3"})
    assert lines(made.start()[0]) == ["lr: 0.1 from the kernel; cell [1] makes 0.01"]
    made.run("2")  # in the kernel with 0.1, in the run with 0.01
    first, *_ = lines(made.start()[0])
    assert first == (
        "lr: 0.1 from the kernel; cell [1] makes 0.01, which cell [2] has used in this run, unlike "
        "in the kernel: assign lr above it to change that, too"
    )


def test_object_with_two_names_is_not_changed_under_one() -> None:
    made = notebook("print(a, c)", "c = {'k': 2}", "a = {'k': [], 'f': print}", "a = c")
    made.run("2")  # in the kernel two objects again, in the run one
    taken, namespace = made.start()
    assert namespace["c"] == {"k": 2}
    assert taken.statements == []
    assert any(kept.startswith("a['k']") for kept in taken.kept)


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
        taken, namespace = made.start()
        assert namespace["x"] == 1
        assert taken.statements == []
