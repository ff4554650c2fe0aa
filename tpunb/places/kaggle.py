"""Runs a notebook on Kaggle: pushes it, waits for the end of its session, fetches its output.

All requests are made by Kaggle's own client (the package `kaggle`), with its login. Kaggle has no
way to end a session from outside, and a session that it cuts off keeps no output.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
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
LOST = 1800.0
"""Seconds for which Kaggle may answer with errors while a session is waited for. It does not know
a notebook that was just pushed."""
_OVER = frozenset(["COMPLETE", "ERROR", "CANCEL_ACKNOWLEDGED"])
"""Names of Kaggle's KernelWorkerStatus: the session has ended."""
_INTERRUPTED = 130
_TITLE = 50
"""Most characters of a notebook's title."""
_DATA = re.compile(r"^[ \t]*%tpu_data[ \t]+(.+)$", re.MULTILINE)
_INSTALL = re.compile(r"^[ \t]*[%!].*\bpip3?\b.*\binstall\b.*\btpunb\b", re.MULTILINE)

_Answer = TypeVar("_Answer")


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
        "enable_internet": True,  # to install tpunb
        "machine_shape": settings.accelerator or None,
        **_sources(notebook),
    }
    if dry_run:
        print(json.dumps(metadata, indent=1))
        return 0
    folder = runs / "kaggle" / slug
    try:
        _push(api, metadata, _write(notebook), settings.session_hours)
        print(
            f"on Kaggle: https://www.kaggle.com/code/{ref} (Cancel Run there ends it); `kaggle "
            f"kernels output {ref} -p {folder}` fetches its output when it has ended",
            flush=True,
        )
        if detach:
            return 0
        completed = _wait(api, ref)
        succeeded = _fetch(api, ref, folder)
    except KeyboardInterrupt:
        print("no longer waiting: the session continues")
        return _INTERRUPTED
    return 0 if completed and succeeded else 1


def _write(notebook: NotebookNode) -> str:
    """The notebook as it is pushed, which installs tpunb first if no cell does."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    new = nbformat.v4.new_notebook(cells=list(notebook.cells))
    if not any(_INSTALL.search(cell.source) for cell in cells):
        new.cells.insert(0, nbformat.v4.new_code_cell("%pip install --quiet tpunb"))
    # Papermill, which runs the notebook on Kaggle, needs the kernel's name. Metadata of Kaggle's
    # own are left out: an image named in them would replace that of a TPU session.
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    new.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return str(nbformat.writes(new))


def _sources(notebook: NotebookNode) -> dict[str, list[str]]:
    """What the notebook's %tpu_data lines name, for Kaggle to mount. Raises DataError."""
    found: dict[str, list[str]] = {"competition": [], "dataset": [], "model": []}
    for cell in notebook.cells:
        for line in _DATA.findall(cell.source) if cell.cell_type == "code" else ():
            for source in filter(None, map(data.parse_kaggle, line.split())):
                versioned = source.handle.count("/") == 4
                # The client takes a model with its version only; kagglehub mounts the others.
                if source.kind != "model" or versioned:
                    found[source.kind].append(source.handle.partition("/versions/")[0])
    return {f"{kind}_sources": names for kind, names in found.items()}


def _push(api: Any, metadata: Mapping[str, Any], text: str, hours: float) -> None:
    """Save the notebook, which starts its session. Raises PlaceError."""
    with tempfile.TemporaryDirectory(prefix="tpunb-") as folder:
        Path(folder, "kernel-metadata.json").write_text(json.dumps(metadata), encoding="utf-8")
        Path(folder, metadata["code_file"]).write_text(text, encoding="utf-8")
        words = folder, str(int(hours * 3600)), metadata["machine_shape"]
        try:
            answer = _ask(lambda: api.kernels_push(*words))
        except PlaceError as error:
            page = f"https://www.kaggle.com/code/{metadata['id']}"
            raise PlaceError(f"{error}. If the session has begun nevertheless: {page}") from None
    if answer.error:
        raise PlaceError(f"Kaggle did not start the notebook: {answer.error}")
    kinds = ("dataset", "competition", "model")
    invalid = [each for kind in kinds for each in getattr(answer, f"invalid_{kind}_sources") or ()]
    if invalid:
        print(
            f"Kaggle does not know, or you may not read: {', '.join(invalid)}. The session has "
            "started without them. To use a competition's data, accept its rules on its page"
        )


def _wait(api: Any, ref: str) -> bool:
    """Wait for the session's end, and return whether Kaggle has completed it.

    Raises PlaceError if Kaggle does not answer for long, or does not know the notebook.
    """
    told, answered = "", time.monotonic()
    while True:
        try:
            status = _ask(lambda: api.kernels_status(ref))
        except PlaceError as error:
            if time.monotonic() - answered > LOST:
                raise PlaceError(f"{error}, for {duration(LOST)}") from None
        else:
            answered = time.monotonic()
            if (name := status.status.name) != told:
                told = name
                why = f": {status.failure_message}" if status.failure_message else ""
                print(f"{time.strftime('%H:%M:%S')} {name}{why}", flush=True)
            if name in _OVER:
                return bool(name == "COMPLETE")
        time.sleep(POLL_INTERVAL)


def _fetch(api: Any, ref: str, folder: Path) -> bool:
    """Fetch the output; return whether all runs in it have succeeded. Raises PlaceError."""
    folder.mkdir(parents=True, exist_ok=True)
    _ask(lambda: api.kernels_output(ref, str(folder)), LONGEST)
    _ask(lambda: api.kernels_pull(ref, str(folder)))  # with its cells' outputs
    succeeded = True
    for spec in sorted(folder.rglob(RunDir(".").spec.name)):
        run = RunDir(spec.parent)
        result = state.read_result(run)
        print(result or f"run {run.id} has no result: it was cut off")
        succeeded &= result is not None and result.state is RunState.SUCCEEDED
    print(f"the session's output is in {folder}, with its log and the executed notebook")
    return succeeded


def _ask(call: Callable[[], _Answer], within: float = PATIENCE) -> _Answer:
    """Return the result of a call of Kaggle's client. Raises PlaceError."""
    import requests

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return patience.start(call).result(within)
    except futures.TimeoutError:
        raise PlaceError(f"Kaggle has not answered in {duration(within)}") from None
    except requests.HTTPError as error:  # its message may have a signed URL
        status = 0 if error.response is None else error.response.status_code
        fix = ": `kaggle auth login` creates a new login" if status == 401 else ""
        raise PlaceError(f"Kaggle answers with HTTP {status}{fix}") from None
    except requests.RequestException as error:
        raise PlaceError(f"Kaggle cannot be reached ({type(error).__name__})") from None
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
        raise PlaceError("you are not logged in to Kaggle on this machine: run `kaggle auth login`")
    return api
