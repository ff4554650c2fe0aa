"""Runs a notebook on Kaggle: pushes it, waits for the end of its session, fetches its output.

All requests are made by Kaggle's own client (the package `kaggle`), with its login. Kaggle has no
way to end a session from outside, and a session that it cuts off keeps no output.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, TypeVar

import nbformat
from nbformat import NotebookNode

from tpunb import data
from tpunb.places.config import KaggleSettings, PlaceConfig
from tpunb.places.errors import PlaceError
from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunState
from tpunb.utils import patience
from tpunb.utils.errors import MissingPackageError
from tpunb.utils.install_commands import PIP_INSTALL
from tpunb.utils.text import duration

PATIENCE = 60.0
"""Time-out of a request in seconds: the client itself would wait for ever."""
LONGEST = 24 * 3600.0
"""Time-out of fetching the output in seconds."""
POLL_INTERVAL = 10.0
"""Seconds between two queries of the session's state."""
UNKNOWN, LOST = 120.0, 1800.0
"""Seconds for which Kaggle may not know a notebook that was just pushed, and may not answer."""
TRIES = 3
"""Attempts to fetch the output."""
_OVER = frozenset(["COMPLETE", "ERROR", "CANCEL_ACKNOWLEDGED"])
"""Names of Kaggle's KernelWorkerStatus: the session has ended."""
_INTERRUPTED = 130
_TITLE = 50
"""Most characters of a notebook's title."""
_SHOWN = 40
"""Lines of the log that are shown after a failure."""
_DATA = re.compile(r"^[ \t]*%tpu_data[ \t]+(.+)$", re.MULTILINE)
_INSTALL = re.compile(r"^[ \t]*[%!].*\bpip3?\b.*\binstall\b.*\btpunb\b", re.MULTILINE)

_Answer = TypeVar("_Answer")


class NoAnswerError(PlaceError):
    """Kaggle cannot be reached, or has a problem of its own; it may answer later."""


def run_notebook(
    notebook: NotebookNode,
    name: str,
    place: PlaceConfig,
    runs: Path,
    *,
    detach: bool,
    dry_run: bool,
) -> int:
    """Push a notebook, wait for the end of its session, and fetch its output.

    `name`: the notebook's name. `runs`: the output goes to `kaggle/<slug>` in it. `detach`: return
    once Kaggle has the notebook. `dry_run`: only print what would be pushed.

    Returns 0 if Kaggle has completed the session, and every run in it has succeeded. Raises
    PlaceError, and MissingPackageError without Kaggle's client.
    """
    settings = place.settings_as(KaggleSettings)
    api = _connect()
    words = re.sub(r"[^a-z0-9]+", "-", f"tpunb-{time.strftime('%Y%m%d-%H%M%S')}-{name}".lower())
    slug = words[:_TITLE].strip("-")
    ref = f"{api.config_values[api.CONFIG_NAME_USER]}/{slug}"
    metadata = {
        "id": ref,
        "title": slug.replace("-", " "),  # from which Kaggle makes the address
        "code_file": "notebook.ipynb",
        "language": "python",
        "kernel_type": "notebook",
        "is_private": True,
        "enable_internet": settings.internet,
        "machine_shape": settings.accelerator or None,
        **_sources(notebook),
    }
    text = _write(notebook, install=settings.internet)
    if dry_run:
        print(json.dumps(metadata, indent=1))
        return 0
    names = (api.CONFIG_NAME_KEY, api.CONFIG_NAME_TOKEN)
    if any(secret in text for key in names if (secret := api.config_values.get(key))):
        raise PlaceError(
            "the notebook contains the key or token of your login to Kaggle: remove it; a notebook "
            "on Kaggle reads its inputs without a login"
        )
    session = _Session(api, ref, runs / "kaggle" / slug)
    try:
        session.push(metadata, text, settings.session_hours)
        if detach:
            print(session.how_to_continue())
            return 0
        completed = session.wait()
        succeeded = session.fetch()
        if not completed:
            session.show_log()
        return 0 if completed and succeeded else 1
    except KeyboardInterrupt:
        maybe = "" if session.begun else "if Kaggle has the notebook, "
        print(f"no longer waiting: {maybe}{session.how_to_continue()}")
        return _INTERRUPTED


def _write(notebook: NotebookNode, *, install: bool) -> str:
    """The notebook as it is pushed, which installs tpunb first if no cell does."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    new = nbformat.v4.new_notebook(cells=list(notebook.cells))
    if install and not any(_INSTALL.search(cell.source) for cell in cells):
        new.cells.insert(0, nbformat.v4.new_code_cell("%pip install --quiet tpunb"))
    # Papermill, which runs the notebook on Kaggle, needs the kernel's name. Metadata of Kaggle's
    # own are left out: an image named in them would replace that of a TPU session.
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    new.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return str(nbformat.writes(new))


def _sources(notebook: NotebookNode) -> dict[str, list[str]]:
    """What the notebook's %tpu_data lines name, for Kaggle to mount. Raises DataError."""
    found: dict[str, list[str]] = {"competitions": [], "datasets": [], "models": []}
    for cell in notebook.cells:
        for line in _DATA.findall(cell.source) if cell.cell_type == "code" else ():
            for source in filter(None, map(data.parse_kaggle, line.split())):
                versioned = source.handle.count("/") == 4
                # The client takes a model with its version only; kagglehub mounts the others.
                if "{" not in source.handle and (source.kind != "models" or versioned):
                    found[source.kind].append(source.handle.partition("/versions/")[0])
    return {f"{kind[:-1]}_sources": names for kind, names in found.items()}


class _Session:
    """A notebook on Kaggle, and its session."""

    def __init__(self, api: Any, ref: str, folder: Path) -> None:
        """`ref`: 'owner/slug'. `folder`: where its output goes."""
        self._api = api
        self._ref = ref
        self._folder = folder
        self.begun = False
        """True once Kaggle has confirmed that it has the notebook."""

    @property
    def _url(self) -> str:
        return f"https://www.kaggle.com/code/{self._ref}"

    def how_to_continue(self) -> str:
        """What to tell the user about a session that is not waited for."""
        return (
            f"the session continues at {self._url} (Cancel Run there ends it). `kaggle kernels "
            f"status {self._ref}` shows its state, and `kaggle kernels output {self._ref} -p "
            f"{self._folder}` fetches its output when it has ended"
        )

    def push(self, metadata: Mapping[str, Any], text: str, hours: float) -> None:
        """Save the notebook, which starts its session. Raises PlaceError."""
        with tempfile.TemporaryDirectory(prefix="tpunb-") as folder:
            Path(folder, "kernel-metadata.json").write_text(json.dumps(metadata), encoding="utf-8")
            Path(folder, metadata["code_file"]).write_text(text, encoding="utf-8")
            words = folder, str(int(hours * 3600)), metadata["machine_shape"]
            try:
                answer = _ask(lambda: self._api.kernels_push(*words))
            except NoAnswerError as error:
                raise NoAnswerError(
                    f"{error}, and it is not known whether the session has begun: look at "
                    f"{self._url}; if it has, it uses your quota"
                ) from None
        if answer.error:
            raise PlaceError(f"Kaggle did not start the notebook: {answer.error}")
        self._ref = "/".join(answer.ref.rstrip("/").split("/")[-2:])
        self.begun = True
        print(f"on Kaggle: {self._url}", flush=True)
        invalid: list[str] = []
        for kind in ("dataset", "competition", "model"):
            invalid += getattr(answer, f"invalid_{kind}_sources") or ()
        if invalid:
            print(
                f"Kaggle does not know, or you may not read: {', '.join(invalid)}. The session has "
                "started without them. To use a competition's data, accept its rules on its page"
            )

    def wait(self) -> bool:
        """Wait for the session's end, and return whether Kaggle has completed it.

        Raises PlaceError if Kaggle does not answer, or does not know the notebook.
        """
        told, answered = "", time.monotonic()
        while True:
            try:
                status = _ask(lambda: self._api.kernels_status(self._ref))
            except PlaceError as error:
                limit = LOST if isinstance(error, NoAnswerError) else UNKNOWN
                if time.monotonic() - answered > limit:
                    raise PlaceError(
                        f"{error}, for {duration(limit)}: {self.how_to_continue()}"
                    ) from None
            else:
                answered = time.monotonic()
                if (name := status.status.name) != told:
                    told = name
                    why = f": {status.failure_message}" if status.failure_message else ""
                    print(f"{time.strftime('%H:%M:%S')} {name}{why}", flush=True)
                if name in _OVER:
                    return bool(name == "COMPLETE")
            time.sleep(POLL_INTERVAL)

    def fetch(self) -> bool:
        """Fetch the output; return whether all runs in it have succeeded. Raises PlaceError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        where = str(self._folder)
        for left in reversed(range(TRIES)):
            try:
                _ask(lambda: self._api.kernels_output(self._ref, where), LONGEST)
                _ask(lambda: self._api.kernels_pull(self._ref, where))  # with its cells' outputs
                break
            except NoAnswerError as error:
                if not left:
                    raise PlaceError(f"{error}: {self.how_to_continue()}") from None
                time.sleep(POLL_INTERVAL)
        succeeded = True
        for spec in sorted(self._folder.rglob(RunDir(".").spec.name)):
            run = RunDir(spec.parent)
            result = state.read_result(run)
            print(result or f"run {run.id} has no result: it was cut off")
            succeeded &= result is not None and result.state is RunState.SUCCEEDED
        print(f"the session's output is in {self._folder}")
        return succeeded

    def show_log(self) -> None:
        """Print the end of the session's log, as it was fetched."""
        log = self._folder / f"{self._ref.partition('/')[2]}.log"
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            text = "".join(str(event["data"]) for event in json.loads(log.read_bytes()))
            print(*text.splitlines()[-_SHOWN:], f"(the end of {log})", sep="\n", file=sys.stderr)


def _ask(call: Callable[[], _Answer], within: float = PATIENCE) -> _Answer:
    """Return the result of a call of Kaggle's client. Raises NoAnswerError and PlaceError."""
    import requests

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return patience.start(call).result(within)
    except futures.TimeoutError:
        raise NoAnswerError(f"Kaggle has not answered in {duration(within)}") from None
    except requests.HTTPError as error:  # its message may have a signed URL
        status = 0 if error.response is None else error.response.status_code
        if status == 401:
            raise PlaceError(
                "Kaggle refuses your login: `kaggle auth login` creates a new one"
            ) from None
        kind = NoAnswerError if status >= 500 or status == 429 else PlaceError
        raise kind(f"Kaggle answers with HTTP {status}") from None
    except requests.RequestException as error:
        raise NoAnswerError(f"Kaggle cannot be reached ({type(error).__name__})") from None
    except ValueError as error:  # the client's own, also for notebooks that do not exist
        raise PlaceError(f"Kaggle's client: {error}") from None


def _connect() -> Any:
    """Return Kaggle's client with a login. Raises MissingPackageError, and PlaceError without."""

    def log_in() -> Any:
        from kaggle.api.kaggle_api_extended import KaggleApi

        api = KaggleApi()
        try:
            api.authenticate()
        except SystemExit:
            return None
        return api

    try:
        api = _ask(log_in)
    except ImportError:
        raise MissingPackageError(
            "kaggle", "notebooks on Kaggle", f"`{PIP_INSTALL} 'tpunb[kaggle]'`"
        ) from None
    if api is None:
        raise PlaceError(
            "you are not logged in to Kaggle on this machine: run `kaggle auth login`, or put a "
            "token from https://www.kaggle.com/settings into ~/.kaggle/access_token"
        )
    return api
