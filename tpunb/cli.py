"""The command `tpunb`: the same things for a terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tpunb import __version__, control, listings, logs, rundir, terminal
from tpunb.data import command
from tpunb.errors import TpunbError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpunb.lint.findings import Finding


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status. Errors that tpunb raises on purpose are one message."""
    chosen = _parser().parse_args(arguments)
    try:
        status: int = chosen.do(chosen)
        sys.stdout.flush()
    except TpunbError as error:
        print(f"tpunb: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tpunb: interrupted", file=sys.stderr)
        return 130  # as a shell has it
    except BrokenPipeError:  # `tpunb logs | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tpunb", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="where we are, and what is wrong with the set-up")
    doctor.add_argument("--json", action="store_true", help="print what was found as JSON")
    doctor.add_argument("--import", action="store_true", dest="try_import",
                        help="also try to import torch and torch_xla (7 s)")  # fmt: skip
    doctor.set_defaults(do=_doctor)
    convert = commands.add_parser("convert", help="the script that %%%%tpu_train would run")
    convert.add_argument("notebook", type=Path, metavar="NB.ipynb")
    convert.add_argument("-o", "--output", type=Path, metavar="OUT.py")
    convert.add_argument("--cell", metavar="N|ID", help="the train cell (the last %%%%tpu_train)")
    convert.set_defaults(do=_convert)

    run = commands.add_parser("run", help="run a notebook with papermill")
    run.add_argument("notebook", type=Path, metavar="NB.ipynb")
    run.add_argument("output", type=Path, nargs="?", metavar="OUT.ipynb")
    run.add_argument("-p", "--parameter", nargs=2, action="append", default=[],
                     metavar=("NAME", "VALUE"), help="for the cell tagged parameters")  # fmt: skip
    run.add_argument("--cores", type=_cores, metavar="N|all", help="ranks, whatever the cells say")
    run.set_defaults(do=_run)

    lint = commands.add_parser("lint", help="what would fail, hang or be slow on a TPU")
    lint.add_argument("notebook", type=Path, metavar="NB.ipynb")
    lint.add_argument("--json", action="store_true", help="print the findings as JSON")
    lint.add_argument("--cell", metavar="N|ID", help="the train cell (the last %%%%tpu_train)")
    lint.set_defaults(do=_lint)
    migrate = commands.add_parser("migrate", help="rewrite retired torch_xla names to current ones")
    migrate.add_argument("notebook", type=Path, metavar="NB.ipynb")
    migrate.add_argument("-o", "--output", type=Path, metavar="OUT.ipynb",
                         help="where it goes (NB.migrated.ipynb)")  # fmt: skip
    migrate.add_argument(
        "--diff", action="store_true", help="show what would change, write nothing"
    )
    migrate.add_argument("--train", action="store_true",
                         help="and put %%%%tpu_train on cells that start the ranks")  # fmt: skip
    migrate.set_defaults(do=_migrate)
    diagnose = commands.add_parser("diagnose", help="causes and fixes for a log")
    diagnose.add_argument("log", metavar="LOG", help="a file, or - for standard input")
    diagnose.add_argument("--returncode", type=int, metavar="N", help="how the process ended")
    diagnose.add_argument("--json", action="store_true", help="print them as JSON")
    diagnose.set_defaults(do=_diagnose)

    listing = commands.add_parser("runs", help="list the runs")
    listing.set_defaults(do=_runs)
    log = commands.add_parser("logs", help="show the log of a run, or search it")
    logs.add_options(log)
    log.set_defaults(do=_logs)
    log.add_argument("-f", "--follow", action="store_true",
                      help="go on as it grows, until the run has ended")  # fmt: skip
    stop = commands.add_parser("stop", help="stop a run, whoever started it, and wait for its end")
    stop.add_argument("run", nargs="?", metavar="RUN",
                      help="an id or any part of it (the latest that goes on)")  # fmt: skip
    stop.set_defaults(do=_stop)
    clean = commands.add_parser("clean", help="remove old runs; asks first")
    clean.add_argument("--older-than", type=_days, metavar="DAYS",
                       help="only those that ended so many days ago")  # fmt: skip
    clean.add_argument("--keep", type=_count, default=0, metavar="N",
                       help="not the N newest")  # fmt: skip
    clean.add_argument("-y", "--yes", action="store_true", help="remove without asking")
    clean.set_defaults(do=_clean)
    keep = commands.add_parser("keep", help="keep this machine running: take --stop-when-done back")
    keep.set_defaults(do=_keep)
    bring = commands.add_parser(
        "data", help="bring data here, or send results away", description=command.DESCRIPTION
    )
    command.add_options(bring)
    bring.set_defaults(do=_data)
    for one in (doctor, listing, log, stop, clean):
        one.add_argument("--runs", type=Path, default=listings.default_folder(), metavar="DIR",
                             help="where run folders are (./runs)")  # fmt: skip
    return parser


def _doctor(chosen: argparse.Namespace) -> int:
    """1 if something must be mended."""
    from tpunb.data import quota
    from tpunb.display import setup
    from tpunb.platforms import environment, importing, report

    asked = quota.Asking(os.environ)
    found = report.look(os.environ, runs=chosen.runs, quota=asked.answer)
    if chosen.try_import:
        here = found.machine
        env = environment.for_run(os.environ, here.device, here=here)
        found = found.with_problem(importing.problem(env, here, found.packages))
    if chosen.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        print(terminal.coloured(setup.text(found)))
    return 1 if found.problems else 0


def _convert(chosen: argparse.Namespace) -> int:
    from tpunb.notebook.files import read
    from tpunb.script.convert import convert

    script = convert(read(chosen.notebook, chosen.cell))
    if chosen.output is None:
        sys.stdout.write(script.text)
    else:
        with _writing(chosen.output):
            chosen.output.write_text(script.text, encoding="utf-8")
    return 0


def _lint(chosen: argparse.Namespace) -> int:
    from tpunb.lint.check import lint
    from tpunb.notebook.files import read

    findings = lint(read(chosen.notebook, chosen.cell))
    if chosen.json:
        print(json.dumps([finding.to_json() for finding in findings], indent=1))
    else:
        said = "\n".join([*(f"{finding}\n" for finding in findings), _counted(findings)])
        print(terminal.coloured(said))
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def _counted(findings: Sequence[Finding]) -> str:
    if not findings:
        return "Nothing was found."
    counts = Counter(finding.severity for finding in findings)
    return ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.items())


def _migrate(chosen: argparse.Namespace) -> int:
    from tpunb.migrate import migrate_text
    from tpunb.notebook.files import load

    load(chosen.notebook)  # says what is wrong with the file, by its name
    with open(chosen.notebook, encoding="utf-8", newline="") as file:
        made = migrate_text(file.read(), train=chosen.train)
    if chosen.diff:
        sys.stdout.write(made.diff)
    else:
        output = chosen.output or chosen.notebook.with_suffix(".migrated.ipynb")
        with _writing(output), open(output, "w", encoding="utf-8", newline="") as file:
            file.write(made.text)
        print(f"wrote {output}")
    print(made.report, file=sys.stderr if chosen.diff else sys.stdout)
    return 0


def _diagnose(chosen: argparse.Namespace) -> int:
    """1 if no cause is known: then the most telling lines are shown, and no guess."""
    from tpunb.diagnosis import diagnose, telling_lines
    from tpunb.diagnosis.runs import end_of, of_log

    path = Path(chosen.log)
    if chosen.log == "-":
        text = sys.stdin.buffer.read().decode("utf-8", "replace")
        found = diagnose(text, chosen.returncode)
    elif path.is_file():
        text, found = end_of(path), of_log(path, chosen.returncode)
    else:
        raise TpunbError(f"there is no log {chosen.log!r}")
    if chosen.json:
        print(json.dumps([one.to_json() for one in found], indent=1))
    elif found:
        print(terminal.coloured("\n\n".join(str(one) for one in found)))
    else:
        lines = telling_lines(text)
        print("No cause is known. The most telling lines:" if lines else "The log is empty.")
        print("\n".join(f"  | {line}" for line in lines))
    return 0 if found else 1


def _run(chosen: argparse.Namespace) -> int:
    from tpunb import batch

    return batch.run(chosen)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TpunbError(f"cannot write {path}: {error.strerror}") from error


def _runs(chosen: argparse.Namespace) -> int:
    print(terminal.coloured(listings.table(chosen.runs)))
    return 0


def _logs(chosen: argparse.Namespace) -> int:
    run = rundir.find(chosen.runs, chosen.run)
    search, colours = logs.search_of(chosen), sys.stdout.isatty()
    if not chosen.follow:
        any_line = False
        for line in logs.read(run, search, colours=colours):
            any_line = True
            sys.stdout.write(f"{line}\n")
        if not any_line and search.tail != 0:
            print(f"tpunb: {logs.nothing(run, search)}", file=sys.stderr)
        return 0
    for lines in logs.follow(run, search, colours=colours):
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
    print(f"tpunb: {control.ended(run)}", file=sys.stderr)
    return 0


def _stop(chosen: argparse.Namespace) -> int:
    for line in control.stop(control.living(chosen.runs, chosen.run), "stopped with tpunb stop"):
        print(line, flush=True)
    return 0


def _clean(chosen: argparse.Namespace) -> int:
    found = listings.old(chosen.runs, chosen.older_than, chosen.keep)
    if not found:
        print(f"There is nothing to remove in {chosen.runs}.")
        return 0
    print(terminal.coloured(listings.listing(found)), flush=True)
    if not chosen.yes:
        if not sys.stdin.isatty():
            raise TpunbError("nothing was removed: there is no terminal to ask at; -y does not ask")
        if input(f"Remove from {chosen.runs}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("Nothing was removed.")
            return 0
    listings.remove(found)
    print("Removed.")
    return 0


def _keep(chosen: argparse.Namespace) -> int:
    from tpunb.money import keep_running

    print(keep_running())
    return 0


def _data(chosen: argparse.Namespace) -> int:
    command.run(chosen, os.environ, print)
    return 0


def _cores(text: str) -> str:
    if text != "all" and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of cores (or 'all')")
    return text


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days")
    return days


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)
