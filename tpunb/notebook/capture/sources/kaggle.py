"""Kaggle: the editor's draft in an interactive session, a file in a batch run.

A batch run ("save version") is papermill with `__notebook__.ipynb` in /kaggle/working as input
and output, according to the metadata of the notebooks that it leaves. In an interactive session
there is no file: Kaggle's service has the draft, and the image includes a client for it
(Kaggle/docker-python 78aaa43, patches/kaggle_session.py).
"""

from __future__ import annotations

import importlib
import json
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpunb.notebook.capture.sources.base import Kernel, LocatedNotebook, UnavailableError

WORKING = Path("/kaggle/working")
WAIT = 10.0
"""Seconds to wait for the service; the client itself would wait for 40."""
IMPORTS = "IMPORT YOUR KAGGLE DATA SOURCES"
"""Text in the cells that the service adds on top of a draft, for use outside of Kaggle."""


def from_kaggle(kernel: Kernel) -> LocatedNotebook | None:
    """The notebook of a Kaggle kernel, unless a program in another kernel started this one."""
    kind = kernel.environ.get("KAGGLE_KERNEL_RUN_TYPE", "").lower()
    if not kind or (kernel.parent is not None and kernel.parent.in_a_kernel()):
        return None
    file = WORKING / "__notebook__.ipynb"
    if kind != "interactive" and file.is_file():
        return LocatedNotebook("Kaggle's batch run", file, title="notebook")
    if kind == "batch":
        return None  # the draft may be newer than the version that runs
    notebook = _draft()
    if notebook is None:
        return None
    ran = kernel.texts()
    cells = [cell for cell in notebook["cells"] if _text(cell) in ran or not _added(cell)]
    return LocatedNotebook("Kaggle's editor", content={**notebook, "cells": cells})


def _draft() -> dict[str, Any] | None:
    """Return the notebook in the editor; None if Kaggle's client is not installed."""
    from http.client import HTTPException

    try:
        session = importlib.import_module("kaggle_session")
        web = importlib.import_module("kaggle_web_client")
    except ImportError:
        return None
    answer: queue.Queue[Any] = queue.Queue()

    def ask() -> None:
        # Refused, no network, no answer, an invalid answer: see kaggle_web_client.
        failures = (web.BackendError, web.CredentialError, OSError, HTTPException, ValueError)
        try:
            answer.put(session.UserSessionClient().get_exportable_ipynb())
        except failures as error:
            answer.put(error)

    threading.Thread(target=ask, name="tpunb-kaggle", daemon=True).start()
    try:
        reply = answer.get(timeout=WAIT)
    except queue.Empty:
        raise UnavailableError(f"Kaggle did not send the notebook within {WAIT:g} s") from None
    if isinstance(reply, Exception):
        raise UnavailableError(f"Kaggle did not send the notebook: {_line(reply)}") from reply
    # Some newer answers have "sourceNullable" instead.
    text = reply.get("source") or reply.get("sourceNullable")
    try:
        notebook = json.loads(text)
        if not isinstance(notebook["cells"], list):
            raise TypeError("cells are not a list")
    except (TypeError, ValueError, KeyError) as error:
        raise UnavailableError(f"Kaggle sent no notebook: {_line(error)}") from error
    return dict(notebook)


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _text(cell: Mapping[str, Any]) -> str:
    source = cell.get("source", "")
    return (source if isinstance(source, str) else "".join(source)).rstrip()


def _added(cell: Mapping[str, Any]) -> bool:
    return cell.get("cell_type") == "code" and IMPORTS in _text(cell)
