"""The option lines of the magics: declared once, with their help, and checked.

Built on IPython's own argument parser, so that a wrong option is a UsageError, as for every
other magic.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import keyword
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from tpunb import logs
from tpunb.data import command
from tpunb.profile import Profile

_BRACES = re.compile(r"\{([A-Za-z_]\w*)[\w.]*\}")
_DOLLAR = re.compile(r"^\$([A-Za-z_]\w*)$")


class _HelpWasShown(Exception):  # noqa: N818 (not an error)
    """The person asked for help, and has got it: there is nothing else to do."""


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        print(parser.format_help())
        raise _HelpWasShown


@contextlib.contextmanager
def help_ends() -> Iterator[None]:
    """A block that ends quietly once `--help` was answered."""
    with contextlib.suppress(_HelpWasShown):
        yield


def parse(
    parser: MagicArgumentParser, line: str, user_ns: Mapping[str, object]
) -> argparse.Namespace:
    """Parse an option line in which IPython has filled in `{name}` and `$name`.

    Raises UsageError for anything that is not an option or its value. IPython fills in all of
    a line or nothing, so what is left of `{name}` is a name that `user_ns` does not know.
    """
    hint = f"({parser.prog.replace('%%', '%')} --help lists the options)"
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{parser.prog}: {error} in: {line}") from None
    for word in words:
        for name in [*_BRACES.findall(word), *_DOLLAR.findall(word)]:
            if name not in user_ns and not hasattr(builtins, name):
                raise UsageError(f"{parser.prog}: {word}: the notebook has no variable {name!r}")
    try:
        namespace: argparse.Namespace = parser.parse_args(words)
    except UsageError as error:
        raise UsageError(f"{parser.prog}: {error} {hint}") from None
    return namespace


def _parser(name: str, description: str) -> MagicArgumentParser:
    parser = MagicArgumentParser(
        prog=name,
        description=description,
        add_help=False,
        formatter_class=argparse.HelpFormatter,  # IPython's own writes reStructuredText
    )
    parser.allow_abbrev = False
    parser.add_argument(
        "-h",
        "--help",
        action=_Help,
        nargs=0,
        default=argparse.SUPPRESS,
        help="show this and do nothing",
    )
    return parser


def cores(text: str) -> int | None:
    """A number of cores, or None for 'all'."""
    if text == "all":
        return None
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of cores (or 'all')")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _minutes(text: str) -> float:
    value = _seconds(text) if text.replace(".", "", 1).isdecimal() else 0.0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes from 1 on")
    return value


def names(text: str) -> tuple[str, ...]:
    """Variable names, with commas between them."""
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in found:
        _variable(name)
    return found


def _variable(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a variable")
    return text


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps from 1 on")
    return int(text)


def _profile(text: str) -> Profile:
    """RANKS or RANKS:FIRST-LAST, as in 0,3:10-20."""
    found = re.fullmatch(r"(\d+(?:,\d+)*)(?::(\d+)-(\d+))?", text)
    ranks, first, last = found.groups() if found else ("", None, None)
    profile = Profile(
        tuple(map(int, ranks.split(","))) if ranks else (), int(first or 5), int(last or 10)
    )
    if not ranks or not 1 <= profile.first <= profile.last:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form RANKS:FIRST-LAST (0,3:5-10)")
    return profile


def _add_stop_when_done(parser: argparse.ArgumentParser, when: str) -> None:
    parser.add_argument(
        "--stop-when-done", action="store_true",
        help=f"stop this TPU VM (gcloud) {when}, after a countdown, once no run goes on, no cell "
        "runs and nobody has the TPU",
    )  # fmt: skip
    parser.add_argument("--idle", type=_minutes, metavar="MINUTES",
                        help="… once that has been so for MINUTES")  # fmt: skip


SETUP = _parser("%tpu_setup", "Say where we are and what will be used; choose defaults; get warm.")
SETUP.add_argument("--cores", type=cores, default=..., metavar="N|all",
                   help="ranks of later runs that do not say how many")  # fmt: skip
SETUP.add_argument("--kernel", choices=("cpu", "tpu"),
                   help="the kernel's own XLA device (cpu: runs find the TPU free)")  # fmt: skip
SETUP.add_argument("--notebook", metavar="PATH", help="this notebook's file, if it is not found")
SETUP.add_argument("--runs", metavar="DIR", help="where run folders go (./runs)")
SETUP.add_argument("--no-warm", action="store_true", help="do not start an agent ahead")
SETUP.add_argument("--json", action="store_true", help="print what was found as JSON")

_add_stop_when_done(SETUP, "after any later run")
SETUP.add_argument("--keep-running", action="store_true",
                   help="take --stop-when-done back, whoever gave it")  # fmt: skip

TRAIN = _parser("%%tpu_train", "Run this notebook up to this cell, and this cell on every core.")
TRAIN.add_argument("--cores", type=cores, default=..., metavar="N|all",
                   help="ranks (all chips here; 4 rehearsal cores without a TPU)")  # fmt: skip
TRAIN.add_argument("--name", help="part of the run's id (the notebook's name)")
TRAIN.add_argument("--returns", type=names, default=(), metavar="a,b",
                   help="bring these names from rank 0's cell back into the kernel")  # fmt: skip
TRAIN.add_argument("--out", type=_variable, metavar="VAR",
                   help="bind the RunResult to VAR as well (it is the cell's value, and "
                   "tpunb.last_run)")  # fmt: skip
TRAIN.add_argument("--env", type=_assignment, action="append", default=[], metavar="K=V",
                   help="for the ranks; may repeat")  # fmt: skip
TRAIN.add_argument("--timeout", type=_seconds, metavar="S", help="end the run after S seconds")
TRAIN.add_argument("--hang-timeout", type=_seconds, default=300.0, metavar="S",
                   help="call the run hung when no rank has shown a sign of life for S; "
                   "0: not at all (300)")  # fmt: skip
TRAIN.add_argument("--grace", type=_seconds, default=15.0, metavar="S",
                   help="time to save after a stop (15)")  # fmt: skip
TRAIN.add_argument("--retries", type=logs.whole, default=0, metavar="N",
                   help="start the ranks again after a failure; they go on from what "
                   "tpunb.load() gives them (0)")  # fmt: skip
TRAIN.add_argument("--resume", metavar="RUN",
                   help="tpunb.load() gives the last checkpoint of this run: an id or any part of "
                   "it, a folder, or a URL")  # fmt: skip
_WHERE = TRAIN.add_mutually_exclusive_group()
_WHERE.add_argument("--bg", action="store_true",
                    help="return a handle at once: .wait() .stop() .result .state; --out binds "
                    "it, .wait() brings --returns; the run ends with the kernel")  # fmt: skip
_WHERE.add_argument("--detach", action="store_true",
                    help="return at once; the run outlives the kernel, and %%tpu_attach follows "
                    "it from any other")  # fmt: skip
TRAIN.add_argument("--logs", default="all", metavar="all|none|RANKS",
                   help="which ranks' lines the cell shows, e.g. 0,3-5 (all)")  # fmt: skip
TRAIN.add_argument("--fresh", action="store_true", help="start a new agent instead of a warm one")
TRAIN.add_argument("--replicate", action="store_true", help="every rank runs the prelude itself")
TRAIN.add_argument("--dry-run", action="store_true",
                   help="show the plan and the script, run nothing")  # fmt: skip
TRAIN.add_argument("--profile", type=_profile, metavar="RANKS:FIRST-LAST",
                   help="write a trace of these ranks and steps for xprof into the run's folder, "
                   "e.g. 0,3:5-10")  # fmt: skip
TRAIN.add_argument("--no-raise", action="store_true", help="a failed run does not fail the cell")
_add_stop_when_done(TRAIN, "when this run has ended")

DEBUG = _parser("%%tpu_debug", "Run this cell in the kernel, on one core, and say what XLA did.")
DEBUG.add_argument("--no-report", action="store_true", help="only run it")
DEBUG.add_argument("--steps", type=_steps, metavar="N",
                   help="stop its training loop after N steps")  # fmt: skip
DEBUG.add_argument("--pdb", action="store_true", help="open the debugger at an exception")
DEBUG.add_argument("--profile", action="store_true",
                   help="write a trace of what ran when, for xprof")  # fmt: skip
DEBUG.add_argument("--nan", action="store_true",
                   help="find the first module and step whose numbers are not finite")  # fmt: skip

RUNS = _parser("%tpu_runs", "List the runs.")

LOGS = _parser("%tpu_logs", "Show the log of a run, or what is searched for in it.")
logs.add_options(LOGS)

STOP = _parser(
    "%tpu_stop",
    "Stop a run, whoever started it: as the interrupt key does, with time to save. Waits until it "
    "has ended. Stopping it again skips what is left of that time.",
)
STOP.add_argument("run", nargs="?", metavar="RUN",
                  help="an id or any part of it (the latest that goes on)")  # fmt: skip

ATTACH = _parser(
    "%tpu_attach",
    "Follow a run from its start to its end, whoever started it, and take its result. "
    "The interrupt key only ends the following: %%tpu_stop ends the run.",
)
ATTACH.add_argument("run", nargs="?", metavar="RUN",
                    help="an id or any part of it (the latest that goes on)")  # fmt: skip
ATTACH.add_argument(
    "--out", type=_variable, metavar="VAR", help="bind the RunResult to VAR as well"
)
ATTACH.add_argument("--logs", default="all", metavar="all|none|RANKS",
                    help="which ranks' lines the cell shows, e.g. 0,3-5 (all)")  # fmt: skip
ATTACH.add_argument("--no-raise", action="store_true", help="a failed run does not fail the cell")

DATA = _parser("%tpu_data", command.DESCRIPTION)
command.add_options(DATA)
