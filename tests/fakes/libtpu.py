"""libtpu's metrics servers: gRPC, with tpu-info's own stubs, on ports of this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from tpu_info.proto import tpu_metric_service_pb2 as messages
from tpu_info.proto import tpu_metric_service_pb2_grpc as service

TOTAL, USED, DUTY = (
    "tpu.runtime.hbm.memory.total.bytes",
    "tpu.runtime.hbm.memory.usage.bytes",
    "tpu.runtime.tensorcore.dutycycle.percent",
)


@dataclass
class FakeChip:
    """What a device says of itself; a test may change it."""

    memory: int
    duty: float
    total: int = 16_000_000_000


@dataclass
class FakeLibtpu(service.RuntimeMetricServiceServicer):  # type: ignore[misc]
    """The server of one process with these chips, as libtpu starts it."""

    chips: list[FakeChip]
    port: int = 0
    asked: list[str] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)
    """Clear: it has got the question, and does not answer."""

    def __post_init__(self) -> None:
        self.answers.set()

    def GetRuntimeMetric(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.append(request.metric_name)
        self.answers.wait()
        gauges = {
            TOTAL: lambda chip: messages.Gauge(as_int=chip.total),
            USED: lambda chip: messages.Gauge(as_int=chip.memory),
            DUTY: lambda chip: messages.Gauge(as_double=chip.duty),
        }
        if request.metric_name not in gauges:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such metric")
        told = [
            messages.Metric(
                attribute=messages.Attribute(
                    key="device-id", value=messages.AttrValue(int_attr=number)
                ),
                gauge=gauges[request.metric_name](chip),
            )
            for number, chip in enumerate(self.chips)
        ]
        return messages.MetricResponse(
            metric=messages.TPUMetric(name=request.metric_name, metrics=told)
        )


@contextmanager
def serving(*processes: Sequence[FakeChip]) -> Iterator[list[FakeLibtpu]]:
    """A server for each process with its chips; `ports_of` them is for libtpu's variable."""
    servers, fakes = [], []
    try:
        for chips in processes:
            server = grpc.server(futures.ThreadPoolExecutor(2))
            fake = FakeLibtpu(list(chips))
            service.add_RuntimeMetricServiceServicer_to_server(fake, server)
            fake.port = server.add_secure_port("localhost:0", grpc.local_server_credentials())
            server.start()
            servers.append(server)
            fakes.append(fake)
        yield fakes
    finally:
        for fake in fakes:
            fake.answers.set()
        for server in servers:
            server.stop(None).wait()


def ports_of(fakes: Sequence[FakeLibtpu]) -> str:
    """As TPU_RUNTIME_METRICS_PORTS has them."""
    return ",".join(str(fake.port) for fake in fakes)
