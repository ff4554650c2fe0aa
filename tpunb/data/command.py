"""`%tpu_data` and `tpunb data`: the same options, and what they do."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from tpunb.data.remote import Say
from tpunb.errors import DataError

DESCRIPTION = "Bring data here, or send results away; nothing is brought twice or overwritten."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument(
        "source", nargs="?", metavar="SOURCE",
        help="kaggle://competitions/NAME, kaggle://datasets/OWNER/NAME, "
        "kaggle://models/OWNER/MODEL/FRAMEWORK/VARIATION or the address of their page, gs://…, "
        "https://… or another URL of fsspec's; with --upload a folder of this machine",
    )  # fmt: skip
    parser.add_argument("--to", metavar="DIR", help="where it goes (data/NAME)")
    parser.add_argument("--upload", metavar="URL", help="send the folder SOURCE there, as gs://…")
    parser.add_argument("--credentials", metavar="PATH|URL",
                        help="put this kaggle.json in place first, with mode 600")  # fmt: skip
    parser.add_argument("--no-unpack", action="store_true", help="keep an archive as it is")


def run(chosen: argparse.Namespace, env: Mapping[str, str], say: Say) -> None:
    """Do it. Raises DataError, SetupError or MissingPackageError."""
    if chosen.source is None and chosen.credentials is None:
        raise DataError("name a SOURCE, as kaggle://competitions/titanic (--help lists the forms)")
    if chosen.source is None and (chosen.to or chosen.upload):
        raise DataError("name a SOURCE: without one there is nothing to bring or to send")
    if chosen.upload and (chosen.to or chosen.no_unpack):
        raise DataError("--upload sends a folder away; --to and --no-unpack are for bringing")
    try:
        _do(chosen, env, say)
    except OSError as error:
        words = error.strerror or str(error)
        raise DataError(f"{words}; what has come is kept: the same again goes on") from error


def _do(chosen: argparse.Namespace, env: Mapping[str, str], say: Say) -> None:
    if chosen.credentials is not None:
        from tpunb.data import credentials

        say(credentials.install(chosen.credentials, env))
    if chosen.upload:
        from tpunb.data.send import send

        send(Path(chosen.source).expanduser(), chosen.upload, say)
    elif chosen.source is not None:
        from tpunb.data.bring import bring

        to = Path(chosen.to).expanduser() if chosen.to else None
        bring(chosen.source, to, env, say, unpacked=not chosen.no_unpack)
