"""The option lines of the magics: options, values, and errors."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.error import UsageError

from tpunb.kernel import options
from tpunb.kernel.magics import TpuMagics
from tpunb.kernel.options import ADVANCED, BACKGROUND, COMMON, FAILURE, PARSERS, MagicParser
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


def test_default_values_of_train_options() -> None:
    assert vars(parsed(options.TRAIN, "")) == {
        "cores": None,  # not given, unlike "all"
        "on": None,
        "name": None,
        "returns": (),
        "out": None,
        "grid": (),
        "env": (),
        "timeout": None,
        "hang_timeout": 300.0,
        "grace": 15.0,
        "retries": 0,
        "resume": None,
        "profile": None,
        "background": False,
        "detach": False,
        "ranks": "all",
        "cold": False,
        "replay": False,
        "replicate": False,
        "dry_run": False,
        "no_raise": False,
        "yes": False,
        "stop_when_done": False,
        "idle": None,
    }


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--cores 8", "cores", 8),
        ("--cores all", "cores", "all"),
        ("--cores=2", "cores", 2),
        ("--returns a,b", "returns", ("a", "b")),
        ("--returns 'a, b,'", "returns", ("a", "b")),
        ("--returns a, b", "returns", ("a", "b")),
        ("--returns a , b ,c --no-raise", "returns", ("a", "b", "c")),
        ("--returns=a, b", "returns", ("a", "b")),
        ("--ranks 0, 3-5", "ranks", "0,3-5"),
        ("--resume", "resume", "last"),
        ("--resume 2026", "resume", "2026"),
        ("--env A=1 --env 'B=x y=z' --env C=", "env", (("A", "1"), ("B", "x y=z"), ("C", ""))),
        ("--timeout 90", "timeout", 90.0),
        ("--timeout 90s", "timeout", 90.0),
        ("--hang-timeout 5m", "hang_timeout", 300.0),
        ("--timeout 9h", "timeout", 32400.0),
        ("--grace 1.5m", "grace", 90.0),
        ("--idle 30m", "idle", 1800.0),
        ("--ranks 0,3-5", "ranks", "0,3-5"),
        ("--timeout 0", "timeout", 0.0),
        ("--grace .5", "grace", 0.5),
        ("--name 'my run'", "name", "my run"),
        ("--name '{not: a field}'", "name", "{not: a field}"),
        ("--env 'PATH=$HOME/bin'", "env", (("PATH", "$HOME/bin"),)),
        ("--no-raise", "no_raise", True),
    ],
)
def test_option_values_are_parsed(line: str, name: str, value: object) -> None:
    assert getattr(parsed(options.TRAIN, line), name) == value


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--corse 2", "unrecognized arguments: --corse 2; did you mean --cores?"),
        ("--core=2", "--core=2; did you mean --cores?"),  # no abbreviations
        ("--xyz", "unrecognized arguments: --xyz (%%tpu_train --help"),
        ("2", "unrecognized arguments: 2"),
        ("--cores", "--cores: expected one argument"),
        ("--cores two", "--cores: 'two' is not a number of cores (or 'all')"),
        ("--cores 1.5", "'1.5' is not a number of cores"),
        ("--cores ²", "'²' is not a number of cores"),
        ("--cores 0", "'0' is not a number of cores"),
        ("--timeout soon", "--timeout: 'soon' is not a duration such as 90, 90s, 5m or 9h"),
        ("--timeout nan", "'nan' is not a duration such as 90, 90s, 5m or 9h"),
        ("--grace -1", "--grace: '-1' is not a duration such as 90, 90s, 5m or 9h"),
        ("--grace inf", "'inf' is not a duration such as 90, 90s, 5m or 9h"),
        ("--timeout 5d", "'5d' is not a duration"),
        ("--idle 10s", "--idle: '10s' is shorter than a minute"),
        ("--ranks 1-", "--ranks: '1-' does not name ranks"),
        ("--env A", "--env: 'A' is not of the form NAME=VALUE"),
        ("--env =1", "'=1' is not of the form NAME=VALUE"),
        ("--returns a b", "unrecognized arguments: b"),
        ("--name a, b", "unrecognized arguments: b"),
        ("--returns a-b", "--returns: 'a-b' is not the name of a variable"),
        ("--returns class", "'class' is not the name of a variable"),
        ("--bg --detach", "argument --detach: not allowed with argument --bg"),
        ("--out a.b", "--out: 'a.b' is not the name of a variable"),
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


def test_ranks_and_tail_of_logs() -> None:
    chosen = parsed(options.LOGS, "digits --ranks 1 --tail 20")
    assert (chosen.run, chosen.ranks, chosen.tail) == ("digits", "1", 20)
    for line in ("--ranks -1", "--ranks x", "--tail 1.5", "--ranks ²"):
        with pytest.raises(UsageError, match=r"%tpu_logs: .*(whole number|name ranks|expected)"):
            parsed(options.LOGS, line)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--kernel gpu", "%tpu_setup: argument --kernel: invalid choice: 'gpu'"),
        ("more", "%tpu_setup: unrecognized arguments: more"),
    ],
)
def test_setup_options_that_are_refused(line: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        parsed(options.SETUP, line)
    assert str(refused.value).startswith(words)


def test_options_stand_in_groups() -> None:
    text = options.TRAIN.format_help()
    heads = [text.index(f"\n{group}:\n") for group in (COMMON, FAILURE, BACKGROUND, ADVANCED)]
    assert heads == sorted(heads)
    assert heads[1] < text.index("  --grace") < heads[2] < text.index("  --bg") < heads[3]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_help_is_shown_whatever_follows(
    parser: MagicParser[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(options.HelpShown):
        parsed(parser, "--help --nonsense")
    text = capsys.readouterr().out
    assert text.startswith(f"usage: {parser.prog} [-h]")
    for _, declared in declarations(parser.options):
        assert declared.usage.split()[0] in text
