from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tpunb.worker.supervisor import preemption
from tpunb.worker.supervisor.preemption import PreemptionWatcher

TRUE, STOP = "TRUE", "TERMINATE_ON_HOST_MAINTENANCE"


def notice_after(
    monkeypatch: pytest.MonkeyPatch, answers: list[tuple[str | Exception | None, str]]
) -> str:
    """The notice after these pairs of answers, for 'preempted' and 'maintenance-event'.

    An exception stands for a pair that is not answered. Then the run ends.
    """
    values: Iterator[str | Exception | None] = iter(
        [
            value
            for one, other in answers
            for value in ((one,) if isinstance(one, Exception) else (one, other))
        ]
    )
    used_up = threading.Event()

    def read(host: str, key: str, timeout: float) -> str | None:
        value = next(values, ConnectionRefusedError())
        if isinstance(value, ConnectionRefusedError):
            used_up.set()
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setenv("GCE_METADATA_HOST", "nowhere")
    monkeypatch.setattr(preemption, "read_metadata", read)
    watcher = PreemptionWatcher(interval=0.0)
    for thread in threading.enumerate():
        if thread.name == "tpunb-preemption":
            while thread.is_alive() and not used_up.is_set():
                thread.join(0.01)
            watcher.close()
            thread.join(20)
    return watcher.notice


def test_preemption_notice_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = ("FALSE", "NONE")
    assert notice_after(monkeypatch, [quiet, (TRUE, "NONE")]) == "instance/preempted is TRUE"
    assert notice_after(monkeypatch, [quiet, quiet, ("FALSE", STOP)]) == (
        f"instance/maintenance-event is {STOP}"
    )
    assert notice_after(monkeypatch, [(None, "MIGRATE_ON_HOST_MAINTENANCE"), quiet]) == ""
    assert notice_after(monkeypatch, []) == ""


def test_preemption_check_tolerates_a_slow_server_after_one_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow: tuple[Exception, str] = (TimeoutError(), "")
    quiet = ("FALSE", "NONE")
    assert notice_after(monkeypatch, [quiet, slow, (TRUE, "NONE")]) == "instance/preempted is TRUE"
    assert notice_after(monkeypatch, [slow, (TRUE, "NONE")]) == ""
