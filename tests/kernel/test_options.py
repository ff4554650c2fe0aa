"""The option lines of the magics: options, values, and errors."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.error import UsageError

from tests.option_tables import usage
from tpunb.kernel import options
from tpunb.kernel.magics import TpuMagics
from tpunb.kernel.options import PARSERS, MagicParser
from tpunb.utils.options import declarations


def parsed(parser: MagicParser[Any], line: str, **user_ns: object) -> Any:
    return parser.parse_line(line, user_ns)


def test_every_magic_has_options_and_shows_them_to_the_question_mark() -> None:
    magics = TpuMagics.magics
    assert set(magics["cell"]) == {"tpu_train", "tpu_debug"}
    assert {name for name in magics["line"] if name[0] != "%"} == {
        parser.prog.lstrip("%") for parser in PARSERS
    }
    for parser in PARSERS:
        assert getattr(TpuMagics, parser.prog.lstrip("%")).__doc__ == parser.format_help()


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--cores 8", "cores", 8),
        ("--cores all", "cores", "all"),
        ("--returns a , b ,c --no-raise", "returns", ("a", "b", "c")),
        ("--ranks 0, 3-5", "ranks", "0,3-5"),
        ("--resume", "resume", "last"),
        ("--env A=1 --env 'B=x y=z' --env C=", "env", (("A", "1"), ("B", "x y=z"), ("C", ""))),
        ("--timeout 90s", "timeout", 90.0),
        ("--idle 30m", "idle", 1800.0),
        ("--name '{not: a field}'", "name", "{not: a field}"),
        ("--env 'PATH=$HOME/bin'", "env", (("PATH", "$HOME/bin"),)),
    ],
)
def test_option_values_are_parsed(line: str, name: str, value: object) -> None:
    assert getattr(parsed(options.TRAIN, line), name) == value


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--corse 2", "unrecognized arguments: --corse 2; did you mean --cores?"),
        ("--cores", "--cores: expected one argument"),
        ("--cores 0", "'0' is not a number of cores"),
        ("--timeout soon", "--timeout: 'soon' is not a duration such as 90, 90s, 5m or 9h"),
        ("--idle 10s", "--idle: '10s' is shorter than a minute"),
        ("--env A", "--env: 'A' is not of the form NAME=VALUE"),
        ("--returns a b", "unrecognized arguments: b; separate names with commas"),
        ("--bg --detach", "argument --detach: not allowed with argument --bg"),
        ("--name 'x", "No closing quotation in: --name 'x"),
    ],
)
def test_option_errors_name_the_magic(line: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        parsed(options.TRAIN, line)
    text = str(refused.value)
    assert text.startswith("%%tpu_train: ")
    assert words in text
    assert "--help" in text or "quotation" in text


@pytest.mark.parametrize("word", ["{cores}", "{cfg.cores}", "--cores={cores}", "$cores"])
def test_unknown_notebook_variable_in_an_option_line(word: str) -> None:
    """IPython replaces all fields of a line or none, so known names are left too."""
    name = "cfg" if "cfg" in word else "cores"
    line = f"--name {{known}} {word if '=' in word else f'--cores {word}'}"
    with pytest.raises(UsageError, match=f"the notebook has no variable '{name}'"):
        parsed(options.TRAIN, line, known="a")


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_help_is_shown_whatever_follows(
    parser: MagicParser[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(options.HelpShown):
        parsed(parser, "--help --nonsense")
    text = capsys.readouterr().out
    assert text.startswith(f"usage: {parser.prog} [-h]")
    for _, declared in declarations(parser.options):
        assert usage(declared).split()[0] in text
