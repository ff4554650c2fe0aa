"""All errors that tpunb raises on purpose. They carry data and make their text when shown.

TpunbError
├─ NotebookError
│   └─ NotebookNotFoundError
├─ ConversionError        .cell .line
│   └─ LintError          .findings
├─ SetupError
│   ├─ DeviceBusyError    .holder .fix
│   └─ MissingPackageError  .package .install
├─ RunError               .result
│   ├─ RankFailedError
│   ├─ RunHungError
│   ├─ RunTimeoutError
│   └─ RunInterruptedError
├─ SpmdError              also a RuntimeError
├─ LaunchError            also a RuntimeError
├─ CollectiveError        in a rehearsal
│   ├─ MismatchError
│   ├─ DeadlockError
│   ├─ PeerLostError
│   └─ WaitedTooLongError
├─ NotRehearsedError      also a NotImplementedError, which libraries catch from torch
├─ HandoffError
├─ CheckpointError        .path
├─ DataError
├─ PlaceError
└─ HostsError             .place .problems: hosts differ or cannot be reached
"""

from tpunb.backends.rehearsal.errors import (
    CollectiveError,
    DeadlockError,
    MismatchError,
    NotRehearsedError,
    PeerLostError,
    WaitedTooLongError,
)
from tpunb.backends.xla.spmd import SpmdError
from tpunb.notebook.errors import ConversionError, NotebookError, NotebookNotFoundError
from tpunb.notebook.lint.findings import LintError
from tpunb.places.errors import HostsError, PlaceError
from tpunb.runs.result import (
    RankFailedError,
    RunError,
    RunHungError,
    RunInterruptedError,
    RunTimeoutError,
)
from tpunb.utils.errors import (
    CheckpointError,
    DataError,
    DeviceBusyError,
    HandoffError,
    LaunchError,
    MissingPackageError,
    SetupError,
    TpunbError,
)

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "ConversionError",
    "DataError",
    "DeadlockError",
    "DeviceBusyError",
    "HandoffError",
    "HostsError",
    "LaunchError",
    "LintError",
    "MismatchError",
    "MissingPackageError",
    "NotRehearsedError",
    "NotebookError",
    "NotebookNotFoundError",
    "PeerLostError",
    "PlaceError",
    "RankFailedError",
    "RunError",
    "RunHungError",
    "RunInterruptedError",
    "RunTimeoutError",
    "SetupError",
    "SpmdError",
    "TpunbError",
    "WaitedTooLongError",
]
