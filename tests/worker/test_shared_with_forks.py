"""Things that processes share after a fork, and things that libraries replace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drivers.ranks import Ranks

MEMORY = "has a temporary file open, or memory that processes share"
ARROW = "import io, pyarrow.csv\npyarrow.csv.read_csv(io.BytesIO(b'a,b\\n1,2\\n'))"


def seen_after(code: str) -> str:
    from tpunb.worker import shared_with_forks

    before = shared_with_forks.find_all()
    kept: dict[str, object] = {}
    exec(code, kept)
    return shared_with_forks.describe_new(before)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = 1", ""),
        ("import os\npipe = os.pipe()", "holds a pipe open"),
        (ARROW, ""),
        (f"import os\npipe = os.pipe()\n{ARROW}", "holds a pipe open"),
        (
            "import socket\ns = socket.create_server(('127.0.0.1', 0))",
            "holds a connection or a listening socket open",
        ),
        ("file = open('written.txt', 'w')", "has written.txt open for writing"),
        ("import torch\nt = torch.zeros(3).share_memory_()", MEMORY),
        ("import multiprocessing\nv = multiprocessing.Value('i')", MEMORY),
        ("import mmap\nm = mmap.mmap(-1, 100)", "has memory that processes share"),
    ],
)
def test_resources_shared_with_forks_exclude_closed_pipes(
    ranks: Ranks, tmp_path: Path, code: str, words: str
) -> None:
    code = f"import os\nos.chdir({str(tmp_path)!r})\n{code}"
    (found,) = ranks.values(seen_after, 1, code)
    assert found == words


def test_a_device_is_shared(ranks: Ranks) -> None:
    (words,) = ranks.values(seen_after, 1, "import os\nx = os.open('/dev/ptmx', os.O_RDWR)")
    assert words.startswith("has /dev/")
    assert ranks.values(seen_after, 1, "x = open('/dev/urandom', 'rb')") == [""]
