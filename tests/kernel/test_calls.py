"""Calls written as text: function names, literals, arguments passed in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.error import UsageError

from tpunb.errors import HandoffError
from tpunb.kernel import calls


def of_notebook(source: str) -> dict[str, Any]:
    """Return the namespace that the cells of a notebook have made."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(source, namespace)
    return namespace


NOTEBOOK = """
import functools, json
from json import dumps as to_text
def train(rate, steps=1, *rest, quick=False): return rate
def other(): pass
second = other
class Trainer:
    def __init__(self, size=1): self.size = size
    def fit(self, steps): return steps
    @classmethod
    def best(cls): return cls()
    @staticmethod
    def check(): return 1
    def __call__(self, x): return x
trainer = Trainer()
by_name = lambda x: x
cached = functools.lru_cache(train)
def wraps(fn):
    @functools.wraps(fn)
    def inner(*args): return fn(*args)
    return inner
wrapped = wraps(other)
def outer():
    def inner(): pass
    return inner
"""


@pytest.fixture
def nb() -> dict[str, Any]:
    return of_notebook(NOTEBOOK)


@pytest.mark.parametrize(
    ("fn", "args", "text"),
    [
        ("train", (0.1,), "value = train(0.1)"),
        ("train", [0.1, "two", None], "value = train(0.1, 'two', None)"),
        ("wrapped", (), "value = wrapped()"),
        ("trainer.fit", (3,), "value = trainer.fit(3)"),
        ("trainer", (3,), "value = trainer(3)"),
        ("Trainer.best", (), "value = Trainer.best()"),
        ("functools.partial(train, 1, quick=True)", (2,), "value = train(1, 2, quick=True)"),
        (
            "functools.partial(functools.partial(train, 1, quick=True), quick=False)",
            (),
            "value = train(1, quick=False)",
        ),
        ("json.loads", ("1",), "value = json.loads('1')"),
        (
            "json.JSONDecoder().decode.__func__",
            (1, "1"),
            "from json.decoder import JSONDecoder as _tpunb_JSONDecoder; "
            "value = _tpunb_JSONDecoder.decode(1, '1')",
        ),
    ],
)
def test_call_source_of_a_function_with_arguments(
    nb: dict[str, Any], fn: str, args: tuple[Any, ...], text: str
) -> None:
    call = calls.write_call(eval(fn, nb), args, nb)
    assert (call.source, call.by_file) == (text, {})
    compile(call.source, "cell", "exec")


def test_a_function_of_a_module_that_the_notebook_does_not_import() -> None:
    import textwrap

    namespace = of_notebook("")
    written = calls.write_call(textwrap.dedent, ("  x",), namespace).source
    assert written == "from textwrap import dedent as _tpunb_dedent; value = _tpunb_dedent('  x')"
    exec(written, namespace)
    assert namespace["value"] == "x"


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        ("lambda: 1", "ranks cannot find the lambda, which has no name in the notebook"),
        ("outer()", "ranks cannot find `outer.<locals>.inner`"),
        ("Trainer().fit", "ranks cannot find the object of Trainer"),
    ],
)
def test_a_function_without_a_name_is_refused(nb: dict[str, Any], fn: str, words: str) -> None:
    with pytest.raises(HandoffError, match=words):
        calls.write_call(eval(fn, nb), () if "fit" not in fn else (1,), nb)


def test_function_whose_name_was_redefined_is_refused(nb: dict[str, Any]) -> None:
    old = nb["other"]
    del nb["second"]
    exec("def other(): return 2", nb)
    with pytest.raises(HandoffError, match="in the notebook, `other` is no longer the function"):
        calls.write_call(old, (), nb)
    nb["kept"] = old
    assert calls.write_call(old, (), nb).source == "value = kept()"


@pytest.mark.parametrize(
    ("fn", "args", "words"),
    [
        ("train", 0.1, r"args must be a tuple of arguments; write args=\(0.1,\)"),
        ("train", (), "`train`.* cannot be called with args=.*: missing a required argument"),
        ("other", (1,), "cannot be called with args=.*: too many positional arguments"),
        ("train(1)", (), "1 cannot be called; pass the function itself"),
        ("coroutine", (), "`coroutine` is a coroutine function"),
        ("functools.partial(generator)", (), "`generator` is a generator function"),
    ],
)
def test_callables_that_cannot_be_launched_are_refused(
    nb: dict[str, Any], fn: str, args: Any, words: str
) -> None:
    exec("async def coroutine(): pass\ndef generator(): yield", nb)
    with pytest.raises(UsageError, match=words):
        calls.write_call(eval(fn, nb), args, nb)


def test_arguments_that_are_not_plain_are_passed_in_a_file(nb: dict[str, Any]) -> None:
    tensor, long = torch.ones(2), "x" * 300
    call = calls.write_call(nb["train"], (tensor, 2, long, {1}), nb)
    assert (
        call.source
        == 'value = train(_tpunb_arguments["rate"], 2, _tpunb_arguments["argument 3"], {1})'
    )
    assert call.by_file == {"rate": tensor, "argument 3": long}
    assert call.plain == {"steps": 2, "argument 4": "{1}"}


def test_possible_secrets_are_not_in_the_text(nb: dict[str, Any]) -> None:
    exec("def push(token, where, mode='x'): pass", nb)
    call = calls.write_call(nb["push"], ("abc", "https://me:word@host"), nb)
    assert call.source == 'value = push(_tpunb_arguments["token"], _tpunb_arguments["where"])'
    assert call.plain == {}


def test_an_argument_that_cannot_be_pickled_is_named_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "values.pt"
    with pytest.raises(HandoffError) as refused:
        calls.save_arguments({"good": [1], "hook": lambda: 1}, path)
    assert str(refused.value).startswith(
        "tpunb.launch: the argument `hook`, a function, cannot be pickled ("
    )
    assert not path.exists()
