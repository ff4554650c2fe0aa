"""How far it is, in one line that is replaced; nothing where nobody watches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

EVERY = 0.5
"""Seconds between two updates."""


@contextlib.contextmanager
def bar(what: str, total: int | None, done: int = 0) -> Iterator[Any]:
    """A tqdm bar of bytes in the cell or terminal; its `update` may be called by any thread.

    The plain one on standard output: a widget is lost in a saved notebook.
    """
    from tqdm.std import tqdm

    watched = sys.stdout.isatty() or "ipykernel" in sys.modules
    with tqdm(
        desc=what, total=total, initial=done, unit="B", unit_scale=True, mininterval=EVERY,
        delay=EVERY, file=sys.stdout, disable=not watched, leave=False,
    ) as made:  # fmt: skip
        yield made
