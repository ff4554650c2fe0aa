"""Fake machines for the tests of this folder, and reports about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fakes.dumps import DUMPS, build
from tests.fakes.machine import FakeMachine
from tests.fakes.metadata import FakeMetadataServer
from tpunb.machine import doctor, metadata
from tpunb.machine.doctor import SetupReport
from tpunb.runs.spec import BackendName

LONG = 60.0
"""Time-out in seconds: 0.25 s is too short on a machine that is busy with other tests."""
metadata.PATIENCE = LONG
PAIR = {"torch": "2.9.0+cpu", "torch_xla": "2.9.0", "libtpu": "0.0.21.1", "ipykernel": "6.17.1"}
"""Colab's packages, which fit together."""
TORCH_TPU = {"torch": "2.13.0+cpu", "torch_tpu": "0.2.0", "libtpu": "0.0.52"}
"""TorchTPU's packages, which fit together."""
OF_KAGGLE = {"torch": "2.8.0+cpu", "torch_xla": "2.8.0", "libtpu": "0.0.17"}


@contextmanager
def machine(name: str, root: Path) -> Iterator[FakeMachine]:
    """A machine from the dumps, with its metadata server."""
    dump = DUMPS[name]
    with build(dump, root) as made:
        if dump.behaviour is None:
            yield made
            return
        with FakeMetadataServer(dump.metadata, dump.behaviour) as server:
            made.env["GCE_METADATA_HOST"] = server.host
            yield made


def look(
    made: FakeMachine,
    packages: Mapping[str, str] = PAIR,
    *,
    needs: Mapping[str, Any] | None = None,
    backend: BackendName | None = "xla",
    **values: Any,
) -> SetupReport:
    """The report with these packages installed. `backend`: None for the one that they are for."""
    path = [made.packages(packages, needs)]
    told = metadata.read_all(made.env, made.root, LONG)
    return doctor.inspect_machine(
        made.env,
        runs=made.root / "runs",
        root=made.root,
        path=path,
        answers=told,
        backend=backend,
        **values,
    )


def ids(found: SetupReport) -> tuple[list[str], list[str]]:
    """The ids of a report's problems and advice."""
    return [one.id for one in found.problems], [one.id for one in found.advice]
