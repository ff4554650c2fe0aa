"""A stand-in for gcloud that knows some TPU VMs, and what it was asked. For tests.

`install` writes an executable `gcloud` into a folder to put first on PATH. It reads and writes
one file, `nodes.json` beside itself: nothing of Google's is ever reached.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.fakes.scripts import SHEBANG


class FakeGcloud:
    """What the stand-in in a folder knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "nodes.json"

    @property
    def nodes(self) -> dict[str, dict[str, Any]]:
        """TPU VMs by 'PROJECT/ZONE/NAME', in the form of `describe --format=json`."""
        found: dict[str, dict[str, Any]] = json.loads(self._file.read_text())
        return found

    def put(self, place: str, **node: Any) -> None:
        """Have a TPU VM, or change it."""
        nodes = self.nodes
        nodes[place] = {**nodes.get(place, {}), **node}
        self._file.write_text(json.dumps(nodes))

    @property
    def calls(self) -> list[list[str]]:
        """The words of every call, in order."""
        log = self.folder / "calls.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def main(self, words: list[str]) -> int:
        """`compute tpus tpu-vm describe|stop NAME --zone= --project=`; nothing else."""
        with open(self.folder / "calls.jsonl", "a") as log:
            log.write(json.dumps(words) + "\n")
        options = dict(
            word.removeprefix("--").partition("=")[::2] for word in words if "--" in word
        )
        names = [word for word in words if not word.startswith("--")]
        if names[:3] != ["compute", "tpus", "tpu-vm"] or len(names) != 5:
            return _fail(f"Invalid choice: {' '.join(words)!r}")
        place = f"{options.get('project')}/{options.get('zone')}/{names[4]}"
        node = self.nodes.get(place)
        if (self.folder / "denied").exists():
            return _fail(f"PERMISSION_DENIED: Permission 'tpu.nodes.get' denied on {place!r}")
        if node is None:
            return _fail(f"NOT_FOUND: Resource {place!r} was not found")
        if names[3] == "describe":
            print(json.dumps(node))
        elif names[3] == "stop" and "quiet" in options:
            self.put(place, state="STOPPING")
            print(f"Request issued for: [{names[4]}]", file=sys.stderr)
        else:
            return _fail(f"{names[3]} is not known here, or would ask")
        return 0


def install(folder: Path) -> FakeGcloud:
    """Write the executable and its empty file."""
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).resolve().parents[2]
    script = folder / "gcloud"
    script.write_text(
        f"{SHEBANG}\n"
        f"import sys; sys.path.insert(0, {str(root)!r})\n"
        "from pathlib import Path\n"
        "from tests.fakes.gcloud import FakeGcloud\n"
        f"sys.exit(FakeGcloud(Path({str(folder)!r})).main(sys.argv[1:]))\n"
    )
    script.chmod(0o755)
    (folder / "nodes.json").write_text("{}")
    return FakeGcloud(folder)


def _fail(words: str) -> int:
    print(f"ERROR: (gcloud.compute.tpus.tpu-vm) {words}", file=sys.stderr)
    return 1
