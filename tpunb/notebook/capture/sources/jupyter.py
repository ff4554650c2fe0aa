"""Jupyter servers: JupyterLab, Notebook, and what is built on them.

A server writes its address and token to a file in the folder of its kernels' connection files,
named for its process id, which its kernels have in JPY_PARENT_PID; `GET /api/sessions` says which
notebook a kernel belongs to, also right after a rename. JPY_SESSION_NAME is the absolute path at
the kernel's start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpunb.notebook.capture.sources.base import Kernel, LocatedNotebook, overlap

WAIT = 1.5
"""Seconds that the server gets. It is on this machine, and has not much to do for this."""
LARGEST = 10_000_000
"""Bytes of an answer that are read at most."""


class Server:
    """The sessions of the Jupyter server that started this kernel.

    A server that cannot be asked (password only, on a socket, gone) does not count as
    unavailable: JPY_SESSION_NAME knows the same, but for renames.
    """

    origin = "the Jupyter server"

    def locate(self, kernel: Kernel) -> LocatedNotebook | None:
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
        best = (
            files[0]
            if len(files) == 1
            else max(files, key=lambda path: overlap(path, kernel), default=None)
        )
        return None if best is None else LocatedNotebook(self.origin, best)


class SessionName:
    """JPY_SESSION_NAME: stale after a rename until the kernel restarts, and a bare name on
    old servers. Programs that are started in a kernel, and their kernels, inherit it: that
    names another notebook.
    """

    origin = "JPY_SESSION_NAME"

    def locate(self, kernel: Kernel) -> LocatedNotebook | None:
        name = kernel.environ.get("JPY_SESSION_NAME", "")
        if kernel.parent is not None and kernel.parent.environ.get("JPY_SESSION_NAME") == name:
            return None
        path = Path(name)
        return LocatedNotebook(self.origin, path) if path.is_absolute() and path.is_file() else None


def _server(folder: Path, pid: int) -> tuple[Path, str, str] | None:
    """The server's folder of notebooks, its address, and its token."""
    for name in (f"jpserver-{pid}.json", f"nbserver-{pid}.json"):  # Notebook 6 wrote the second
        try:
            info = json.loads((folder / name).read_text(encoding="utf-8"))
            root = info.get("root_dir") or info["notebook_dir"]
            return Path(root), str(info["url"]), str(info.get("token") or "")
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            continue
    return None


def _sessions(url: str, token: str) -> object:
    """What the server answers to `GET /api/sessions`; None if it does not, or not in time."""
    import http.client
    import ssl
    import urllib.request

    # The certificate of a server on one's own machine is its own, as a rule; this is the port
    # that a file of this user's names, so nobody else is given the token.
    unchecked = ssl.create_default_context()
    unchecked.check_hostname = False
    unchecked.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),  # proxies are for what is not on this machine
        urllib.request.HTTPSHandler(context=unchecked),
    )
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/api/sessions")
        if token:
            request.add_header("Authorization", f"token {token}")
        with opener.open(request, timeout=WAIT) as answer:
            return json.loads(answer.read(LARGEST))
    except (OSError, ValueError, http.client.HTTPException):
        # OSError is the base of refusals, time-outs and error statuses; ValueError of an
        # address that is none and an answer that is no JSON, as a page for logging in.
        return None


def _paths(sessions: object, kernel_id: str) -> list[str]:
    """The paths of a kernel's notebooks, relative to the server's folder."""
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
