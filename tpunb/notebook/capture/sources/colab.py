"""Colab: request the notebook from the page in the browser, which holds it.

The protocol, read in googlecolab/colabtools 3c07d77 (google/colab/_message.py): the kernel sends
a `colab_request` of type `get_ipynb` to the page, which answers on the stdin channel. The answer
holds the notebook as it would be saved now, unsaved edits and all. A notebook's cells have their
id in their metadata, and requests to execute carry it (google/colab/_history.py).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from tpunb.notebook.capture.sources.base import Kernel, LocatedNotebook, UnavailableError

WAIT = 30.0
"""Seconds to wait for the page. Colab's own default, 5 s, is too short for a notebook with large
outputs, and so was 20 s (DagsHub/client#468)."""


def from_colab(kernel: Kernel) -> LocatedNotebook | None:
    """The page's copy of the notebook, in a kernel started by Colab itself."""
    # google.colab can also be imported in kernels that papermill starts, so that is no test.
    if not type(kernel.shell).__module__.startswith("google.colab."):
        return None
    if threading.current_thread() is not threading.main_thread():
        raise UnavailableError("Colab sends the notebook to the main thread only")
    try:
        from google.colab._message import MessageError, blocking_request
    except ImportError as error:
        raise UnavailableError(f"cannot request the notebook from Colab: {error}") from None
    try:
        reply = blocking_request("get_ipynb", request="", timeout_sec=WAIT)
    except MessageError as error:
        raise UnavailableError(f"Colab did not return the notebook: {error}") from error
    if reply is None:
        raise UnavailableError(
            f"Colab did not send the notebook within {WAIT:g} s (is its page open?)"
        )
    notebook = reply.get("ipynb") if isinstance(reply, Mapping) else None
    if not isinstance(notebook, Mapping):
        raise UnavailableError("Colab sent no notebook")
    return LocatedNotebook("the page of Colab", content=notebook, title=_name(notebook))


def _name(notebook: Mapping[str, object]) -> str | None:
    """The file's name in Drive, without its suffix."""
    metadata = notebook.get("metadata")
    colab = metadata.get("colab") if isinstance(metadata, Mapping) else None
    name = colab.get("name") if isinstance(colab, Mapping) else None
    return name.removesuffix(".ipynb") if isinstance(name, str) and name else None
