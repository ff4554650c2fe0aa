"""The numbers of a torch_xla metrics report (`met.metrics_report()`) that a log holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_METRIC = re.compile(r"Metric: (\w+)")
_SAMPLES = re.compile(r"TotalSamples: (\d+)")
_ACCUMULATOR = re.compile(r"Accumulator: ([\w.]+)")
_TIME = re.compile(r"([\d.]+)(d|h|ms|us|ns|m|s)")
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_COMPILES = ("CompileTime", "XrtCompile")
_EXECUTIONS = ("ExecuteTime", "XrtExecute", "ExecuteReplicatedTime", "ExecuteComputation")


@dataclass(frozen=True)
class Report:
    """How often programs were compiled and run, and how long compiling took; 0 without one."""

    compiles: int = 0
    executions: int = 0
    compile_seconds: float = 0.0

    @property
    def share(self) -> float:
        """Compilations for each execution."""
        return self.compiles / self.executions if self.executions else 0.0

    @classmethod
    def read(cls, lines: Sequence[str]) -> Report:
        """The last value of each metric; the names are those of XRT and of PJRT releases."""
        counts: dict[str, int] = {}
        seconds: dict[str, float] = {}
        name = None
        for line in lines:
            # Most lines of a log are neither: these look-ups are cheaper than a pattern.
            if "Metric: " in line and (match := _METRIC.search(line)):
                name = match[1]
            elif name and "TotalSamples: " in line and (match := _SAMPLES.search(line)):
                counts[name] = int(match[1])
            elif name and "Accumulator: " in line and (match := _ACCUMULATOR.search(line)):
                parts = _TIME.findall(match[1])
                seconds[name] = sum(float(number) * _SECONDS[unit] for number, unit in parts)
                name = None
        return cls(
            max((counts.get(metric, 0) for metric in _COMPILES), default=0),
            max((counts.get(metric, 0) for metric in _EXECUTIONS), default=0),
            max((seconds.get(metric, 0.0) for metric in _COMPILES), default=0.0),
        )
