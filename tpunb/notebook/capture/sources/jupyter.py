"""Jupyter servers: JupyterLab, Notebook, and what is built on them.

A server writes its address and token to a file in the folder of its kernels' connection files. The
file is named after the server's process id, which its kernels have in JPY_PARENT_PID.
`GET /api/sessions` returns the notebook of each kernel, correct even right after a rename.
JPY_SESSION_NAME is the absolute path at the kernel's start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpunb.notebook.capture.sources.base import Kernel, LocatedNotebook, overlap

WAIT = 1.5
"""Seconds to wait for the server, which is on this machine and has little to do for the answer."""
LARGEST = 10_000_000
"""Maximum number of bytes read of an answer."""


def from_server(kernel: Kernel) -> LocatedNotebook | None:
    """The sessions of the Jupyter server that started this kernel.

    A server that cannot be queried (password only, on a socket, gone) does not count as
    unavailable: JPY_SESSION_NAME gives the same answer, except after renames.
    """
    if kernel.connection_file is None or kernel.parent is None:
        return None
    file = Path(kernel.connection_file)
    server = _server(file.parent, kernel.parent.pid)
    if server is None:
        return None
    root, url, token = server
    token = token or kernel.environ.get("JUPYTERHUB_API_TOKEN", "")
    kernel_id = file.stem.removeprefix("kernel-")
    paths = [root / path for path in _paths(_sessions(url, token), kernel_id)]
    files = [path for path in dict.fromkeys(paths) if path.is_file()]
    # Several notebooks may share a kernel.
    best = max(files, key=lambda path: overlap(path, kernel), default=None)
    return None if best is None else LocatedNotebook("the Jupyter server", best)


def from_session_name(kernel: Kernel) -> LocatedNotebook | None:
    """The variable JPY_SESSION_NAME.

    It is stale after a rename until the kernel restarts, and a bare name on old servers. Programs
    started in a kernel, and their kernels, inherit it: then it names another notebook.
    """
    name = kernel.environ.get("JPY_SESSION_NAME", "")
    if kernel.parent is not None and kernel.parent.environ.get("JPY_SESSION_NAME") == name:
        return None
    path = Path(name)
    known = path.is_absolute() and path.is_file()
    return LocatedNotebook("JPY_SESSION_NAME", path) if known else None


def _server(folder: Path, pid: int) -> tuple[Path, str, str] | None:
    """Return the server's notebook folder, its address and its token."""
    for name in (f"jpserver-{pid}.json", f"nbserver-{pid}.json"):  # Notebook 6 wrote the second
        try:
            info = json.loads((folder / name).read_text(encoding="utf-8"))
            root = info.get("root_dir") or info["notebook_dir"]
            return Path(root), str(info["url"]), str(info.get("token") or "")
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            continue
    return None


def _sessions(url: str, token: str) -> object:
    """Return the server's answer to `GET /api/sessions`; None if none arrives in time."""
    import http.client
    import ssl
    import urllib.request

    # A server on the user's own machine usually has a self-signed certificate. The port is the one
    # in a file of this user, so the token is not sent to another user's server.
    unchecked = ssl.create_default_context()
    unchecked.check_hostname = False
    unchecked.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),  # no proxy for a server on this machine
        urllib.request.HTTPSHandler(context=unchecked),
    )
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/api/sessions")
        if token:
            request.add_header("Authorization", f"token {token}")
        with opener.open(request, timeout=WAIT) as answer:
            return json.loads(answer.read(LARGEST))
    except (OSError, ValueError, http.client.HTTPException):
        # OSError covers refused connections, time-outs and error statuses; ValueError invalid
        # addresses and answers that are not JSON, such as a login page.
        return None


def _paths(sessions: object, kernel_id: str) -> list[str]:
    """Return the paths of a kernel's notebooks, relative to the server's folder."""
    paths = []
    for session in sessions if isinstance(sessions, list) else ():
        if not isinstance(session, Mapping):
            continue
        kernel: Any = session.get("kernel")
        path = session.get("path")
        if (
            isinstance(kernel, Mapping)
            and kernel.get("id") == kernel_id
            and session.get("type", "notebook") == "notebook"
            and isinstance(path, str)
        ):
            paths.append(path.lstrip("/"))
    return paths
