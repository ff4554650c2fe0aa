"""Where an exception was raised: by which library, at which version, called from which line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import metadata

from tpunb.diagnostics.failure.evidence import LoggedException
from tpunb.diagnostics.failure.log import Log

_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?'
    r"|^\s*File (?P<shown>/\S+?\.py):(?P<number>\d+), in (?P<name>[\w.<>]+)"
    r"|^(?P<old>/\S+\.py) in (?P<call>[\w.<>]+)(?:\(|\s*$)"
)
_CELL = re.compile(
    r"^\s*cell \[(?P<cell>\d+)\], line (?P<line>\d+)"
    r"|^Cell In ?\[(?P<shown>\d+)\],? line:? (?P<number>\d+)"
    r"|^\s*(?:File )?[\"']?<ipython-input-(?P<old>\d+)-"
)
_PACKAGE = re.compile(r"(?:^|/)(?:site|dist)-packages/(?P<name>[A-Za-z_]\w*)(?:/|\.py$)")
_STANDARD = re.compile(r"/lib/python3[.\d]*/(?!(?:site|dist)-packages/)|^<frozen ")
_FOUNDATIONS = frozenset("torch torch_xla jax jaxlib numpy".split())
"""Libraries that others call: an error in them is the fault of their caller, or of its version."""
_DISTRIBUTIONS = {"PIL": "pillow", "cv2": "opencv-python", "sklearn": "scikit-learn"}
"""Names of packages that differ from the names of their modules."""


@dataclass(frozen=True)
class LoggedFrame:
    """A line of a traceback that names a place."""

    file: str = ""
    line: int | None = None
    function: str = ""
    cell: int | None = None
    """The cell; None for a file."""
    code: str = ""
    """The lines that the traceback shows of it."""

    @property
    def library(self) -> str | None:
        """The package that the file belongs to; None for the user's code."""
        if match := _PACKAGE.search(self.file):
            return match["name"]
        top = self.file.partition("/")[0]
        return top if top in _FOUNDATIONS else None

    @property
    def is_standard(self) -> bool:
        """True for a file of Python's standard library."""
        return bool(_STANDARD.search(self.file))

    def __str__(self) -> str:
        if self.cell is not None:
            return f"cell [{self.cell}]" + (f", line {self.line}" if self.line else "")
        place = self.file.rpartition("-packages/")[2]
        return f"{place}, line {self.line}" if self.line else place


@dataclass(frozen=True)
class Origin:
    """The place at which an exception was raised, and the code that led to it."""

    raised: LoggedFrame
    """The innermost frame outside of Python's standard library."""
    caller: LoggedFrame
    """The innermost frame outside of torch, torch_xla and similar libraries as well."""

    @classmethod
    def of(cls, log: Log, error: LoggedException) -> Origin | None:
        """Return the origin of an exception; None if the log does not show its traceback."""
        frames = [frame for frame in _frames(log, error) if not frame.is_standard]
        if not frames:
            return None
        calling = [frame for frame in frames if frame.library not in _FOUNDATIONS] or frames
        return cls(frames[-1], calling[-1])


def _frames(log: Log, error: LoggedException) -> Iterable[LoggedFrame]:
    frame, code = None, list[str]()
    for number in range(error.start, error.line):
        if log.writer(number) not in (error.rank, None):
            continue
        body = log.body(number)
        if (following := _frame(body)) is None:
            code.append(body)
            continue
        if frame is not None:
            yield replace(frame, code="\n".join(code))
        frame, code = following, []
    if frame is not None:
        yield replace(frame, code="\n".join(code))


def _frame(body: str) -> LoggedFrame | None:
    """The place that a line of a traceback names; None for a line of code."""
    if match := _CELL.match(body):
        cell = int(match["cell"] or match["shown"] or match["old"])
        line = match["line"] or match["number"]
        return LoggedFrame(line=int(line) if line else None, cell=cell)
    if match := _FRAME.match(body):
        file = match["file"] or match["shown"] or match["old"]
        line = match["line"] or match["number"]
        function = match["function"] or match["name"] or match["call"] or ""
        return LoggedFrame(file, int(line) if line else None, function)
    return None


def version_of(library: str, log: Log, *, here: bool) -> str | None:
    """The version of a library: as the log names it, else as installed if the run was `here`."""
    name = _DISTRIBUTIONS.get(library, library)
    parts = "[-_.]".join(map(re.escape, re.split(r"[-_.]", name)))
    named = re.compile(
        rf"(?<![\w./-]){parts}[`'\"]?(?: version)?(?::\s*|==|\s{{1,40}}\(?|-)"
        r"v?(\d+\.\d+(?:\.\w+)*)",
        re.IGNORECASE,
    )
    for alike in log.shapes:
        if match := named.search(log.body(alike[0])):
            return match[1]
    if here:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None
    return None
