"""The option lines of the magics: what there is, and what is refused."""

from __future__ import annotations

from argparse import Namespace

import pytest
from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from tpunb import options
from tpunb.magics import TpuMagics

SURFACE = {
    "%tpu_setup": [
        "-h --help",
        "--cores N|all",
        "--kernel cpu|tpu",
        "--notebook PATH",
        "--runs DIR",
        "--no-warm",
        "--json",
        "--stop-when-done",
        "--idle MINUTES",
        "--keep-running",
    ],
    "%%tpu_train": [
        "-h --help",
        "--cores N|all",
        "--name NAME",
        "--returns a,b",
        "--out VAR",
        "--env K=V",
        "--timeout S",
        "--hang-timeout S",
        "--grace S",
        "--retries N",
        "--resume RUN",
        "--bg",
        "--detach",
        "--logs all|none|RANKS",
        "--fresh",
        "--replicate",
        "--dry-run",
        "--profile RANKS:FIRST-LAST",
        "--no-raise",
        "--stop-when-done",
        "--idle MINUTES",
    ],
    "%%tpu_debug": ["-h --help", "--no-report", "--steps N", "--pdb", "--profile", "--nan"],
    "%tpu_runs": ["-h --help"],
    "%tpu_logs": [
        "-h --help",
        "RUN",
        "--rank R",
        "--stream stdout|stderr|prelude",
        "--level warning|error",
        "--grep PATTERN",
        "--context N",
        "--tail N",
    ],
    "%tpu_stop": ["-h --help", "RUN"],
    "%tpu_attach": ["-h --help", "RUN", "--out VAR", "--logs all|none|RANKS", "--no-raise"],
    "%tpu_data": [
        "-h --help",
        "SOURCE",
        "--to DIR",
        "--upload URL",
        "--credentials PATH|URL",
        "--no-unpack",
    ],
}
"""What people type and write into notebooks that they keep: changed only with a reason."""

PARSERS = (
    options.SETUP, options.TRAIN, options.DEBUG, options.RUNS, options.LOGS, options.STOP,
    options.ATTACH, options.DATA,
)  # fmt: skip


def parsed(parser: MagicArgumentParser, line: str, **user_ns: object) -> Namespace:
    return options.parse(parser, line, user_ns)


def test_the_surface_is_what_it_was() -> None:
    found = {}
    for parser in PARSERS:
        rows = []
        for action in parser._actions:
            values = "|".join(map(str, action.choices)) if action.choices else action.metavar
            value = values or action.dest.upper()
            words = [*action.option_strings, *([] if action.nargs == 0 else [str(value)])]
            rows.append(" ".join(words))
        found[parser.prog] = rows
    assert found == SURFACE


def test_every_magic_has_options_and_shows_them_to_the_question_mark() -> None:
    magics = TpuMagics.magics
    assert set(magics["cell"]) == {"tpu_train", "tpu_debug"}
    assert set(magics["line"]) == {name.lstrip("%") for name in SURFACE}
    for parser in PARSERS:
        assert getattr(TpuMagics, parser.prog.lstrip("%")).__doc__ == parser.format_help()


def test_defaults() -> None:
    assert vars(parsed(options.TRAIN, "")) == {
        "cores": ...,  # not said, unlike None: all
        "name": None,
        "returns": (),
        "out": None,
        "env": [],
        "timeout": None,
        "hang_timeout": 300.0,
        "grace": 15.0,
        "retries": 0,
        "resume": None,
        "profile": None,
        "bg": False,
        "detach": False,
        "logs": "all",
        "fresh": False,
        "replicate": False,
        "dry_run": False,
        "no_raise": False,
        "stop_when_done": False,
        "idle": None,
    }


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--cores 8", "cores", 8),
        ("--cores all", "cores", None),
        ("--cores=2", "cores", 2),
        ("--returns a,b", "returns", ("a", "b")),
        ("--returns 'a, b,'", "returns", ("a", "b")),
        ("--env A=1 --env 'B=x y=z' --env C=", "env", [("A", "1"), ("B", "x y=z"), ("C", "")]),
        ("--timeout 90", "timeout", 90.0),
        ("--timeout 0", "timeout", 0.0),
        ("--grace .5", "grace", 0.5),
        ("--name 'my run'", "name", "my run"),
        ("--name '{not: a field}'", "name", "{not: a field}"),
        ("--env 'PATH=$HOME/bin'", "env", [("PATH", "$HOME/bin")]),
        ("--no-raise", "no_raise", True),
    ],
)
def test_values(line: str, name: str, value: object) -> None:
    assert getattr(parsed(options.TRAIN, line), name) == value


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--corse 2", "unrecognized arguments: --corse 2"),
        ("--core 2", "unrecognized arguments: --core 2"),  # no abbreviations
        ("2", "unrecognized arguments: 2"),
        ("--cores", "--cores: expected one argument"),
        ("--cores two", "--cores: 'two' is not a number of cores (or 'all')"),
        ("--cores 1.5", "'1.5' is not a number of cores"),
        ("--cores ²", "'²' is not a number of cores"),
        ("--timeout soon", "--timeout: 'soon' is not a number of seconds"),
        ("--timeout nan", "'nan' is not a number of seconds"),
        ("--grace -1", "--grace: '-1' is not a number of seconds"),
        ("--grace inf", "'inf' is not a number of seconds"),
        ("--env A", "--env: 'A' is not of the form NAME=VALUE"),
        ("--env =1", "'=1' is not of the form NAME=VALUE"),
        ("--returns a-b", "--returns: 'a-b' is not the name of a variable"),
        ("--returns class", "'class' is not the name of a variable"),
        ("--bg --detach", "argument --detach: not allowed with argument --bg"),
        ("--out a.b", "--out: 'a.b' is not the name of a variable"),
        ("--name 'x", "No closing quotation in: --name 'x"),
    ],
)
def test_what_is_wrong_is_named_with_the_magic(line: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        parsed(options.TRAIN, line)
    text = str(refused.value)
    assert text.startswith("%%tpu_train: ")
    assert words in text
    assert "--help" in text or "quotation" in text


@pytest.mark.parametrize("word", ["{cores}", "{cfg.cores}", "--cores={cores}", "$cores"])
def test_names_that_the_notebook_has_not(word: str) -> None:
    """IPython fills in all fields of a line or none, so those that it knows are left too."""
    name = "cfg" if "cfg" in word else "cores"
    line = f"--name {{known}} {word if '=' in word else f'--cores {word}'}"
    with pytest.raises(UsageError, match=f"the notebook has no variable '{name}'"):
        parsed(options.TRAIN, line, known="a")


def test_rank_and_tail_are_whole_numbers() -> None:
    chosen = parsed(options.LOGS, "digits --rank 1 --tail 20")
    assert (chosen.run, chosen.rank, chosen.tail) == ("digits", "1", 20)
    for line in ("--rank -1", "--rank x", "--tail 1.5", "--rank ²"):
        with pytest.raises(UsageError, match=r"%tpu_logs: .*(whole number|name ranks|expected)"):
            parsed(options.LOGS, line)


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_help_ends_the_magic_quietly(
    parser: MagicArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    after = []
    with options.help_ends():
        after.append(parsed(parser, "--help --nonsense"))
    assert after == []
    text = capsys.readouterr().out
    assert text.startswith(f"usage: {parser.prog} [-h]")
    for row in SURFACE[parser.prog]:
        assert row.split()[-2 if row[0] == "-" and " " in row else -1] in text
