"""Options of the magics, some of them shared with the command line."""

from __future__ import annotations

import argparse
import builtins
import keyword
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

from tpunb.data import HELP, DataOptions
from tpunb.runs import listing, logs
from tpunb.runs.spec import BackendName, Device, Profile
from tpunb.utils.options import (
    OptionParser,
    add_options,
    argument,
    build_options,
    declarations,
    flag,
    join_lists,
    option,
    parse_count,
    parse_duration,
    parse_rank_list,
)
from tpunb.utils.text import parse_ranks

_Options = TypeVar("_Options")

Cores = int | Literal["all"]

RESULT = "value"
"""Variable that the value of a `tpunb.launch` call is assigned to; a key of `RunResult.returns`."""

LAST = "last"
"""Value of `--resume` for the latest run of this notebook that has a checkpoint."""

COMMON = "common options"
FAILURE = "failures and stops"
BACKGROUND = "background and afterwards"
ADVANCED = "advanced"


def cores(text: str) -> Cores:
    """Parse a number of cores or 'all'. Whether the machine can run that many is checked later."""
    if text == "all":
        return "all"
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of cores (or 'all')")
    return int(text)


def _idle(text: str) -> float:
    seconds = parse_duration(text)
    if seconds < 60:
        raise argparse.ArgumentTypeError(f"{text!r} is shorter than a minute")
    return seconds


def _variable(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid variable name")
    return text


def _variables(text: str) -> tuple[str, ...]:
    """Parse variable names separated by commas."""
    return tuple(_variable(name.strip()) for name in text.split(",") if name.strip())


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def _step_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps (1 or more)")
    return int(text)


def _profile(text: str) -> Profile:
    """Parse RANKS, FIRST-LAST or RANKS:FIRST-LAST: 'all', '0,3', '10-20', '0,3:10-20'."""
    match = re.fullmatch(
        r"(?:(?P<ranks>all|\d+(?:,\d+)*)(?::|$))?(?:(?P<first>\d+)-(?P<last>\d+))?", text, re.ASCII
    )
    if match is not None and text and text[-1] != ":":
        ranks = match["ranks"] or "all"
        numbers = () if ranks == "all" else tuple(map(int, ranks.split(",")))
        profile = Profile(numbers, int(match["first"] or 5), int(match["last"] or 10))
        if 1 <= profile.first <= profile.last:
            return profile
    raise argparse.ArgumentTypeError(f"{text!r} is not of the form RANKS:FIRST-LAST, e.g. 0,3:5-10")


def ranks_to_show(text: str, world_size: int, option: str) -> frozenset[int]:
    """Parse the value of `--ranks`; raise UsageError for a rank that the run does not have."""
    from IPython.core.error import UsageError

    try:
        return parse_ranks(text, world_size)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


# Options that several magics and commands share.


def run_argument(default: str) -> Any:
    """Return the argument RUN."""
    return argument("RUN", help=f"run id, or a part of it (default: {default})")


def _cores_option(help: str) -> Any:
    return option("--cores", type=cores, metavar="N|all", help=help, group=COMMON)


def ranks_option(group: str) -> Any:
    """Return the option --ranks."""
    return option(
        "--ranks",
        type=parse_rank_list,
        default="all",
        metavar="all|none|LIST",
        help="show only the lines of these ranks, e.g. 0,3-5 (default: all)",
        group=group,
    )


def _out_option(group: str) -> Any:
    return option(
        "--out",
        type=_variable,
        metavar="VAR",
        help="also assign the RunResult, which is the cell's value and tpunb.last_run, to this "
        "variable",
        group=group,
    )


def _no_raise_flag(group: str) -> Any:
    return flag("--no-raise", help="do not fail the cell when the run fails", group=group)


def _stop_when_done_flag(when: str) -> Any:
    return flag(
        "--stop-when-done",
        help=f"stop this TPU VM (with gcloud) {when}, once no run is active, no cell is running "
        "and the TPU is free, after a countdown",
        group=BACKGROUND,
    )


def _idle_option() -> Any:
    return option(
        "--idle",
        type=_idle,
        metavar="TIME",
        help="with --stop-when-done: wait until the machine has been idle for this long, e.g. 30m",
        group=BACKGROUND,
    )


@dataclass(frozen=True)
class SetupOptions:
    """Options of `%tpu_setup`."""

    cores: Cores | None = _cores_option("default number of ranks of later runs")
    notebook: str | None = option(
        "--notebook",
        metavar="PATH",
        help="this notebook's file, if it is not found (or set the variable TPUNB_NOTEBOOK)",
        group=COMMON,
    )
    runs: str | None = option(
        "--runs",
        metavar="DIR",
        help="where run folders go (default: ./runs); a URL such as gs://bucket/runs gets copies "
        "of them",
        group=COMMON,
    )
    json: bool = flag("--json", help="print the environment as JSON", group=COMMON)
    stop_when_done: bool = _stop_when_done_flag("after a later run")
    idle: float | None = _idle_option()
    keep_running: bool = flag(
        "--keep-running", help="cancel every --stop-when-done", group=BACKGROUND
    )
    backend: str | None = option(
        "--backend",
        choices=("auto", *get_args(BackendName)),
        help="what runs train with: torch_xla, TorchTPU, or torch.distributed alone (default: "
        "auto, what the notebook's code is written for, otherwise what is installed)",
        group=COMMON,
    )
    kernel: str | None = option(
        "--kernel",
        choices=("cpu", "tpu"),
        help="the XLA device of the kernel itself (default: cpu, so that runs can take the TPU)",
        group=ADVANCED,
    )
    ahead: bool = flag(
        "--ahead",
        help="after each cell that runs in the kernel, also run it in the background, so that the "
        "first run starts at once",
        group=ADVANCED,
    )
    no_warm: bool = flag(
        "--no-warm", help="do not preload torch_xla in the background", group=ADVANCED
    )

    @property
    def kernel_device(self) -> Device | None:
        """The device that `--kernel` names."""
        return None if self.kernel is None else "TPU" if self.kernel == "tpu" else "CPU"


@dataclass(frozen=True)
class TrainOptions:
    """Options of `%%tpu_train`."""

    cores: Cores | None = _cores_option(
        "number of ranks, one for each core (default: all chips of this machine; without a TPU, "
        "as many rehearsal cores as it has processors, from 2 to 4)"
    )
    on: str | None = option(
        "--on",
        metavar="PLACE",
        help="run the cell at a place of places.toml, e.g. on all hosts of a pod (default: this "
        "machine)",
        group=COMMON,
    )
    name: str | None = option(
        "--name",
        metavar="NAME",
        help="part of the run's id (default: the notebook's name)",
        group=COMMON,
    )
    returns: tuple[str, ...] = option(
        "--returns",
        type=_variables,
        default=(),
        metavar="a,b",
        help="copy these variables from rank 0 into the notebook",
        group=COMMON,
    )
    out: str | None = _out_option(COMMON)
    env: tuple[tuple[str, str], ...] = option(
        "--env",
        type=_assignment,
        repeatable=True,
        metavar="K=V",
        help="set an environment variable for the ranks (repeatable)",
        group=COMMON,
    )
    ranks: str = ranks_option(COMMON)
    dry_run: bool = flag(
        "--dry-run", help="show the plan and the script, run nothing", group=COMMON
    )
    timeout: float | None = option(
        "--timeout",
        type=parse_duration,
        metavar="TIME",
        help="stop the run after this long: 90 or 90s, 5m, 9h (default: no limit)",
        group=FAILURE,
    )
    hang_timeout: float = option(
        "--hang-timeout",
        type=parse_duration,
        default=300.0,
        metavar="TIME",
        help="call the run hung after this long without activity from any rank (default: 5m; 0: "
        "off)",
        group=FAILURE,
    )
    grace: float = option(
        "--grace",
        type=parse_duration,
        default=15.0,
        metavar="TIME",
        help="time to save after a stop, before the ranks are terminated (default: 15s)",
        group=FAILURE,
    )
    retries: int = option(
        "--retries",
        type=parse_count,
        default=0,
        metavar="N",
        help="start the ranks again up to N times after a failure; tpunb.load() gives them their "
        "last checkpoint (default: 0)",
        group=FAILURE,
    )
    resume: str | None = option(
        "--resume",
        metavar="RUN",
        alone=LAST,
        help="continue from the last checkpoint of this run, which tpunb.load() returns: id or any "
        "part of it, folder or URL (no value or `last`: this notebook's latest run with a "
        "checkpoint)",
        group=FAILURE,
    )
    no_raise: bool = _no_raise_flag(FAILURE)
    background: bool = flag(
        "--bg",
        help="return at once a handle (.state .result .wait() .stop()), which --out also assigns; "
        ".wait() sets the variables of --returns; the run ends with the kernel",
        group=BACKGROUND,
        exclusive=True,
    )
    detach: bool = flag(
        "--detach",
        help="return at once; the run outlives the kernel, and %%tpu_attach follows it from any "
        "kernel",
        group=BACKGROUND,
        exclusive=True,
    )
    yes: bool = flag(
        "--yes",
        help="with --on: start without a confirmation, even if the run may cost more than the "
        "place's ask_above",
        group=BACKGROUND,
    )
    stop_when_done: bool = _stop_when_done_flag("when this run has ended")
    idle: float | None = _idle_option()
    cold: bool = flag(
        "--cold",
        help="start afresh: without the preloaded torch_xla and without a kept prelude",
        group=ADVANCED,
    )
    replay: bool = flag(
        "--replay",
        help="run the cells as they are, without the kernel's parameters",
        group=ADVANCED,
    )
    replicate: bool = flag(
        "--replicate", help="run the prelude in every rank, as under torchrun", group=ADVANCED
    )
    profile: Profile | None = option(
        "--profile",
        type=_profile,
        metavar="RANKS:FIRST-LAST",
        alone="all",
        help="write an xprof trace of these ranks and steps into the run folder, and show how a "
        "step's time was spent; e.g. 5-10 or 0,3:5-10 (no value: all ranks, steps 5-10)",
        group=ADVANCED,
    )

    caller: ClassVar[str] = "%%tpu_train"
    """The magic or function that the user called, for errors."""

    def written(self, option: str) -> str:
        """Return an option as the user wrote it, for errors."""
        return f"{self.caller} --{option}"


@dataclass(frozen=True)
class LaunchOptions(TrainOptions):
    """Options of `tpunb.launch`, which takes some options of a train cell as arguments."""

    caller: ClassVar[str] = "tpunb.launch"
    returns: tuple[str, ...] = (RESULT,)

    def written(self, option: str) -> str:
        """Return an option as the user wrote it, for errors."""
        return f"{self.caller}({option}=)"


@dataclass(frozen=True)
class DebugCellOptions:
    """Options of `%%tpu_debug`."""

    no_report: bool = flag("--no-report", help="run the cell without a report")
    steps: int | None = option(
        "--steps", type=_step_count, metavar="N", help="stop the cell's training loop after N steps"
    )
    profile: bool = flag("--profile", help="write an xprof trace of the cell")
    nan: bool = flag("--nan", help="find the first module and step with non-finite numbers")


@dataclass(frozen=True)
class RunsOptions:
    """Options of `%tpu_runs` and `tpunb runs`."""

    whole: bool = flag("--all", help=f"list all runs, not only the {listing.NEWEST} newest")


@dataclass(frozen=True)
class LogsOptions:
    """Options of `%tpu_logs` and `tpunb logs`."""

    run: str | None = run_argument("the latest")
    ranks: str = ranks_option("")
    level: str | None = option(
        "--level",
        choices=("warning", "error"),
        help="show only warnings and errors, or only errors; with their tracebacks",
    )
    grep: re.Pattern[str] | None = option(
        "--grep",
        type=logs.parse_pattern,
        metavar="PATTERN",
        help="show only lines that match this regular expression; case-insensitive unless the "
        "pattern has capitals",
    )
    tail: int | None = option(
        "--tail", type=parse_count, metavar="N", help="show only the last N lines"
    )

    def search(self) -> logs.LogSearch:
        """Return the search that these options describe."""
        return logs.LogSearch(self.ranks, self.level, self.grep, self.tail)


@dataclass(frozen=True)
class StopOptions:
    """Options of `%tpu_stop` and `tpunb stop`."""

    run: str | None = run_argument("the latest active run")


@dataclass(frozen=True)
class AttachOptions:
    """Options of `%tpu_attach`."""

    run: str | None = run_argument("the latest active run")
    out: str | None = _out_option("")
    ranks: str = ranks_option("")
    no_raise: bool = _no_raise_flag("")


class HelpShown(Exception):  # noqa: N818 (not an error)
    """Raised after `--help` has been printed: nothing remains to be done."""


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        print(parser.format_help())
        raise HelpShown


_LISTS = ("--returns", "--ranks")
_BRACES = re.compile(r"\{([A-Za-z_]\w*)[\w.]*\}")
_DOLLAR = re.compile(r"^\$([A-Za-z_]\w*)$")


class MagicParser(OptionParser, Generic[_Options]):
    """Parser for the option line of a magic; raises IPython's UsageError for a wrong line."""

    def __init__(self, name: str, options: type[_Options], description: str) -> None:
        super().__init__(prog=name, description=description, add_help=False, allow_abbrev=False)
        self.options = options
        grouped = any(declared.group == COMMON for _, declared in declarations(options))
        group = self.add_argument_group(COMMON) if grouped else self
        group.add_argument(
            "-h",
            "--help",
            action=_Help,
            nargs=0,
            default=argparse.SUPPRESS,
            help="show this help and exit",
        )
        add_options(self, options)

    def error(self, message: str) -> Any:
        """Raise UsageError, which IPython shows as one line."""
        from IPython.core.error import UsageError

        raise UsageError(message)

    def parse_line(
        self,
        line: str,
        user_ns: Mapping[str, object],
        unknown: str = "the notebook has no variable {name!r}",
    ) -> _Options:
        """Parse an option line in which IPython has replaced `{name}` and `$name` by their values.

        Raises UsageError for anything that is not an option or its value. IPython replaces all
        names of a line or none; if a `{name}` is left, some name is not in `user_ns`, which the
        error explains with `unknown`.
        """
        from IPython.core.error import UsageError

        try:
            words = shlex.split(line)
        except ValueError as error:
            raise UsageError(f"{self.prog}: {error} in: {line}") from None
        for word in words:
            for name in [*_BRACES.findall(word), *_DOLLAR.findall(word)]:
                if name not in user_ns and not hasattr(builtins, name):
                    raise UsageError(f"{self.prog}: {word}: {unknown.format(name=name)}")
        try:
            return build_options(self.options, self.parse_args(join_lists(words, _LISTS)))
        except UsageError as error:
            help_line = f"{self.prog} --help lists the options"
            raise UsageError(f"{self.prog}: {error} ({help_line})") from None


SETUP = MagicParser(
    "%tpu_setup", SetupOptions, "Show the environment, set defaults, preload torch_xla."
)
TRAIN = MagicParser(
    "%%tpu_train", TrainOptions, "Run this notebook up to this cell, and this cell on every core."
)
DEBUG = MagicParser(
    "%%tpu_debug",
    DebugCellOptions,
    "Run this cell in the kernel, on one core, and report what slows it down or is wrong.",
)
RUNS = MagicParser("%tpu_runs", RunsOptions, "List the runs, newest first.")
LOGS = MagicParser("%tpu_logs", LogsOptions, "Show or search the log of a run.")
STOP = MagicParser(
    "%tpu_stop",
    StopOptions,
    "Stop a run, whoever started it, as the interrupt key does: with time to save. Wait until it "
    "has ended. A second stop skips the rest of that time.",
)
ATTACH = MagicParser(
    "%tpu_attach",
    AttachOptions,
    "Follow a run, whoever started it, from its first line to its end, and return its result. "
    "Interrupting only detaches; the run continues (%tpu_stop ends it).",
)
DATA = MagicParser("%tpu_data", DataOptions, f"{HELP.capitalize()}.")

PARSERS: tuple[MagicParser[Any], ...] = (SETUP, TRAIN, DEBUG, RUNS, LOGS, STOP, ATTACH, DATA)
