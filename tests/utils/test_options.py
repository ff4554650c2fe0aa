"""Options that are declared as a dataclass, on parsers of any kind."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from tpunb.utils.options import (
    OptionParser,
    add_options,
    argument,
    build_options,
    flag,
    option,
    parse_count,
    parse_duration,
    parse_rank_list,
)


@dataclass(frozen=True)
class Sent:
    source: Path = argument("SOURCE", help="what", required=True, type=Path)
    target: str | None = argument("TARGET", help="where to")
    pairs: tuple[tuple[str, str], ...] = option(
        "-p", "--pair", metavar=("NAME", "VALUE"), repeatable=True, help="several"
    )
    folder: Path = option("--folder", type=Path, default=Path.cwd, help="made when it is needed")
    quick: bool = flag("--quick", help="at once", group="how", exclusive=True)
    slow: bool = flag("--slow", help="later", group="how", exclusive=True)


def parser(prog: str = "send") -> OptionParser:
    made = OptionParser(prog=prog)
    add_options(made, Sent)
    return made


def parsed(*words: str) -> Sent:
    return build_options(Sent, parser().parse_args(words))


def test_defaults_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parsed("a") == Sent(Path("a"), None, (), tmp_path, False, False)
    words = ["a", "b", "-p", "x", "1", "--pair", "y", "2", "--folder", "c", "--quick"]
    assert parsed(*words) == Sent(Path("a"), "b", (("x", "1"), ("y", "2")), Path("c"), True, False)


def test_a_default_does_not_grow() -> None:
    assert parsed("a", "-p", "x", "1").pairs == (("x", "1"),)
    assert parsed("a").pairs == ()


def failed(parser: argparse.ArgumentParser, *words: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words)
    return ended.value.code


def test_of_options_that_exclude_each_other_one_is_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert failed(parser(), "a", "--quick", "--slow") == 2
    assert "argument --slow: not allowed with argument --quick" in capsys.readouterr().err


def test_a_subcommand_names_the_nearest_of_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    main = OptionParser(prog="main")
    add_options(main.add_subparsers().add_parser("send"), Sent)
    assert failed(main, "send", "a", "--foldre=b") == 2
    error = capsys.readouterr().err
    assert "main send: error: unrecognized arguments: --foldre=b; did you mean --folder?" in error
    assert failed(main, "send", "a", "--xyz") == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("90", 90), ("90s", 90), ("5m", 300), ("9h", 32400), (".5", 0.5), ("1.5 h", 5400)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1", "nan", "inf", "1e3", "5d", "1h30m", "٣"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a duration such as 90, 90s, 5m"):
        parse_duration(text)


def test_counts_and_lists_of_ranks() -> None:
    assert parse_count("12") == 12
    assert [parse_rank_list(text) for text in ("all", "none", "0,3-5")] == ["all", "none", "0,3-5"]
    for parse, texts in ((parse_count, ("-1", "1.5", "²")), (parse_rank_list, ("x", "1-", "²"))):
        for text in texts:
            with pytest.raises(argparse.ArgumentTypeError):
                parse(text)
