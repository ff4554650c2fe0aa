"""IPython's special syntax, as IPython itself finds it. Fails when IPython moves."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.magics.execution import ExecutionMagics

from tests.support import examples
from tpunb.notebook.convert import magics, syntax
from tpunb.notebook.convert.cells import plain_python
from tpunb.notebook.convert.magics import NotPythonError
from tpunb.notebook.convert.syntax import Special, clean, first_special, interpolated


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = 1\n%env A=b", Special("magic", 1, 1, "", "env", "A=b", "")),
        ("if x:\n    !ls -l", Special("shell", 1, 1, "    ", "", "ls -l", "")),
        ("y = !ls \\\n  -l\nz", Special("capture", 0, 2, "y = ", "", "ls    -l", "")),
        ("!!ls", Special("capture", 0, 1, "", "", "ls", "")),
        ("(1,\n 2)\nfoo.bar?", Special("help", 2, 1, "", "pinfo", "foo.bar", "")),
        ("??foo", Special("help", 0, 1, "", "pinfo2", "foo", "")),
        ("*foo*?", Special("help", 0, 1, "", "psearch", "*foo*", "")),
        (",f a b", Special("call", 0, 1, "", "", "", 'f("a", "b")')),
        ("x = '%env'  # %env\nx = (1\n%2)", None),
        ("def f(:\n  x\n y", None),
        ("", None),
    ],
)
def test_first(source: str, found: Special | None) -> None:
    special = first_special(source.split("\n"))
    if found is None or special is None:
        assert special is found
    else:
        python = special.python if special.kind == "call" else ""
        shown = (special.kind, special.line, special.count, special.before, special.name)
        assert (*shown, special.argument, python) == (
            *(found.kind, found.line, found.count, found.before, found.name),
            *(found.argument, found.python),
        )


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "",
                "  ",
                "  x = 1",
                "x = 1",
                ">>> x",
                "... y",
                "In [1]: z",
                "   ...: z",
                "    '''",
                "\tx",
            ]
        ),
        max_size=7,
    )
)
def test_clean_strips_what_ipython_strips(lines: list[str]) -> None:
    made = clean(lines)
    assert len(made) == len(lines)
    # Cells without special syntax are what IPython runs, but for empty lines at the top.
    assume(any(line.strip() for line in lines))
    expected = [f"{line}\n" for line in lines]
    for transform in TransformerManager().cleanup_transforms:
        expected = transform(expected)
    top = len(made) - len(expected)
    assert made[top:] == "".join(expected).split("\n")[:-1]
    assert not "".join(made[:top]).strip()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("ls {a} {b[0]}", "ls A 1"),
        ("ls {'x'.upper()} {a!r} {b[0:1]}", "ls X 'A' [1]"),
        ("ls $a $nope $$a '$a'", "ls A $nope $a '$a'"),
        ("ls ${a} ${a:-b}", "ls ${a} ${a:-b}"),
        ("find . -exec rm {} ;", "find . -exec rm {} ;"),
        ("awk '{print $1}' {a}", "awk '{print $1}' {a}"),
        ("echo {{x}} {a}", "echo {x} A"),
        ("echo } {a}", "echo } {a}"),
        ("echo {a!s:.2f}", "echo {a!s:.2f}"),
    ],
)
def test_expanded(text: str, value: str) -> None:
    assert eval(interpolated(text), {"a": "A", "b": [1], "n": 7}) == value


def test_ipython_still_has_these_options() -> None:
    for name in ("timeit", "prun"):
        source = inspect.getsource(getattr(ExecutionMagics, name))
        options = magics.TIMED[name].removesuffix("v:")  # new in IPython 8
        assert any(f"{quote}{options}" in source for quote in "'\"")
        assert magics.UNWRAPPED[name] == magics.TIMED[name]


@pytest.mark.parametrize(
    ("argument", "options", "code"),
    [
        ("x = 'a  b'", "", "x = 'a  b'"),
        ("-n 3 -r1  f( x )", "n:r:tcp:qov:", "f( x )"),
        ("-s time -l 3 main()", "D:l:rs:T:q", "main()"),
        ("--no-raise-error f(x)", "", "f(x)"),
        ("-x", "", "-x"),
        ("", "", ""),
    ],
)
def test_statement(argument: str, options: str, code: str) -> None:
    assert magics.timed_code(argument, options) == code


def test_warm_up_is_enough_for_first() -> None:
    syntax.warm_up()
    assert first_special(["!ls"]) is not None


def test_a_cell_is_looked_at_once() -> None:
    made = plain_python("%time x = 123456\n!ls")
    assert plain_python("%time x = 123456\n!ls") is made
    with pytest.raises(NotPythonError, match="write the imports"):
        plain_python("x = 123456\n%pylab")
