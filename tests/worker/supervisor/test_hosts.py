"""Host 0's decisions for all hosts, and a host that receives nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from time import monotonic, sleep

import pytest

from tpunb.runs.protocol import (
    AbandonAttempt,
    AllFinished,
    AllHere,
    AttemptFailed,
    AttemptFinished,
    AttemptReady,
    Beat,
    HostEnded,
    HostHere,
    HostLost,
    JoinHosts,
    Message,
    RefuseRun,
    RunOver,
    StartAttempt,
)
from tpunb.runs.spec import Stop, StopCause
from tpunb.worker.supervisor.hosts import (
    Decisions,
    Leader,
    Member,
)

NAMES = ("h0", "h1", "h2")
STOP = Stop(StopCause.USER, "enough")


class Made:
    """Host 0's state machine for three hosts, and the messages sent to each."""

    def __init__(self) -> None:
        self.time = 100.0
        self.told: dict[int, list[Message]] = defaultdict(list)
        self.decisions = Decisions(
            NAMES,
            "10.0.0.2",
            lambda node, message: self.told[node].append(message),
            lost_after=20.0,
            patience=300.0,
            clock=lambda: self.time,
        )

    def say(self, node: int, message: Message) -> None:
        self.decisions.take(node, message)

    def all_say(self, message: Message) -> None:
        for node in range(len(NAMES)):
            self.say(node, message)

    def news(self, node: int) -> list[Message]:
        """The messages sent to a host since the last call."""
        told, self.told[node] = self.told[node], []
        return told

    def all_news(self) -> list[Message]:
        """The messages sent to all hosts, which must be equal."""
        first, *others = [self.news(node) for node in range(len(NAMES))]
        assert all(other == first for other in others)
        return first

    def pass_time(self, seconds: float, *, silent: tuple[int, ...] = ()) -> None:
        """Let time pass, with a heartbeat of the other hosts every second."""
        for _ in range(int(seconds)):
            self.time += 1.0
            for node in range(1, len(NAMES)):
                if node not in silent and self.decisions.hosts[node].here:
                    self.say(node, Beat())
            self.decisions.look()

    def run(self) -> None:
        """Let all hosts join, and start their ranks."""
        self.all_say(HostHere({}))
        self.all_say(AttemptReady(0, 40123))
        self.all_news()


@pytest.fixture
def made() -> Made:
    return Made()


def test_start_waits_for_all_hosts(made: Made) -> None:
    made.say(1, HostHere({}))
    made.say(2, HostHere({}))
    assert made.all_news() == []
    made.say(0, HostHere({}))
    assert made.all_news() == [AllHere()]


def test_attempt_starts_when_all_hosts_are_ready(made: Made) -> None:
    made.all_say(HostHere({}))
    made.all_news()
    made.say(0, AttemptReady(0, 40123))
    made.say(1, AttemptReady(0, 0))
    assert made.all_news() == []
    made.say(2, AttemptReady(0, 0))
    assert made.all_news() == [StartAttempt(0, "10.0.0.2", 40123)]


def test_finish_is_announced_when_the_last_host_finishes(made: Made) -> None:
    made.run()
    made.say(2, AttemptFinished(0))
    made.say(0, AttemptFinished(0))
    assert made.all_news() == []
    made.say(1, AttemptFinished(0))
    assert made.all_news() == [AllFinished()]
    made.say(1, HostEnded({}, 0.0))
    assert made.all_news() == []
    assert not made.decisions.over
    made.say(2, HostEnded({}, 0.0))
    assert made.decisions.over


def test_failure_ends_an_attempt_once_and_all_hosts_retry(made: Made) -> None:
    made.run()
    made.say(0, AttemptFinished(0))
    made.say(1, AttemptFailed(0, "rank h1/3 has failed"))
    made.say(2, AttemptFailed(0, "rank h2/4 has failed"))
    assert made.all_news() == [AbandonAttempt(0, "rank h1/3 has failed")]
    made.say(0, AttemptReady(1, 40123))
    made.say(2, AttemptReady(1, 0))
    made.say(2, AttemptFailed(0, "late"))
    assert made.all_news() == []
    made.say(1, AttemptReady(1, 0))
    assert made.all_news() == [StartAttempt(1, "10.0.0.2", 40123)]
    made.say(2, AttemptFailed(1, "again"))
    assert made.all_news() == [AbandonAttempt(1, "again")]


def test_stop_is_sent_to_all_hosts_once_and_again_if_hurried(made: Made) -> None:
    made.run()
    made.say(2, STOP)
    made.say(1, Stop(StopCause.USER, "me too"))
    assert made.all_news() == [STOP]
    hurry = Stop(StopCause.USER, "now", now=True)
    made.say(1, hurry)
    assert made.all_news() == [hurry]


def test_stop_before_the_attempt_prevents_it(made: Made) -> None:
    made.all_say(HostHere({}))
    made.say(0, STOP)
    made.all_news()
    made.all_say(AttemptReady(0, 40123))
    assert made.all_news() == []


def test_early_end_of_a_host_stops_the_others(made: Made) -> None:
    """Its prelude has failed."""
    made.all_say(HostHere({}))
    made.all_news()
    made.say(1, HostEnded({}, 0.0))
    (stop,) = made.all_news()
    assert stop == Stop(StopCause.PEER_FAILED, "h1 has ended before the others")


def test_silent_host_is_lost_and_the_others_are_notified(made: Made) -> None:
    made.run()
    made.pass_time(20, silent=(2,))
    assert made.all_news() == []
    made.pass_time(1, silent=(2,))
    (lost,) = made.news(1)
    assert isinstance(lost, HostLost)
    assert (lost.node_rank, lost.reason) == (2, "host h2 was lost: no heartbeat for 20 s")
    assert made.news(0) == [lost]
    assert made.news(2) == []
    made.say(1, HostEnded({}, 0.0))
    assert made.decisions.over


def test_silence_that_loses_no_host(made: Made) -> None:
    """Of a suspended supervisor, and of a host that has ended."""
    made.run()
    made.pass_time(5)
    made.time += 1000.0
    made.decisions.look()
    made.pass_time(5)
    assert made.all_news() == []
    made.all_say(AttemptFinished(0))
    made.say(2, HostEnded({}, 0.0))
    made.all_news()
    made.pass_time(30, silent=(2,))
    assert made.all_news() == []


def test_missing_host_is_lost_after_the_timeout(made: Made) -> None:
    made.say(1, HostHere({}))
    made.pass_time(400)
    assert made.news(1) == []  # host 0 waits for its turn on a device
    made.say(0, HostHere({}))
    made.pass_time(301)
    (lost,) = made.news(1)
    assert isinstance(lost, HostLost)
    assert lost.reason == "host h2 has not connected within 300 s"


def test_host_waiting_for_its_device_is_not_lost(made: Made) -> None:
    made.say(0, HostHere({}))
    made.say(1, HostHere({}))
    for _ in range(500):
        made.say(2, Beat())
        made.pass_time(1)
    assert made.all_news() == []
    made.say(2, HostHere({}))
    assert made.all_news() == [AllHere()]


def test_hang_only_if_all_hosts_are_idle(made: Made) -> None:
    made.run()
    made.say(1, Beat(idle=True))
    assert not made.decisions.all_idle()
    made.say(2, Beat(idle=True))
    assert made.decisions.all_idle()
    made.say(1, Beat(idle=False))
    assert not made.decisions.all_idle()


def test_mismatch_of_hosts_is_refused_by_name(made: Made) -> None:
    for node, torch in enumerate(("2.9.0", "2.8.0", "2.9.0")):
        made.say(node, HostHere({"torch": torch, "chips": "4"}))
    assert made.all_news() == [RefuseRun("torch: 2.9.0 on h0, h2, but 2.8.0 on h1")]


def test_unreachable_host_0_error_names_the_address() -> None:
    time = 100.0
    join = JoinHosts("/r", 1, "127.0.0.1", "127.0.0.1", 9, "ab" * 32, {}, patience=30.0)
    member = Member("run", NAMES, join, lambda: time)
    for _ in range(31):
        member.step(idle=False)
        assert not member.hear()
        time += 1.0
    member.step(idle=False)
    (lost,) = member.hear()
    assert isinstance(lost, HostLost)
    assert lost.reason == (
        "host h0 could not be reached at 127.0.0.1:9 within 30 s (Connection refused)"
    )
    assert member.over
    member.close(None)


class Two:
    """Host 0 and host 1 with a real connection and one simulated clock."""

    def __init__(self) -> None:
        self.time = 100.0
        address = "127.0.0.1"
        join = JoinHosts("/r", 0, address, address, 0, "ab" * 32, {}, 2.0, 20.0, 300.0)
        self.leader = Leader("run", NAMES[:2], join, lambda: self.time)
        join = replace(join, node_rank=1, port=self.leader.port)
        self.member = Member("run", NAMES[:2], join, lambda: self.time)
        self.heard: dict[int, list[Message]] = {0: [], 1: []}
        self.leader.say(HostHere({}))
        self.member.say(HostHere({}))
        self.await_words(1, AllHere())

    def step(self, *numbers: int) -> None:
        for number in numbers or (0, 1):
            host = (self.leader, self.member)[number]
            host.step(idle=False)
            self.heard[number] += host.hear()

    def await_words(self, number: int, message: Message) -> None:
        deadline = monotonic() + 20
        while message not in self.heard[number]:
            self.step()
            sleep(0.001)
            self.time += 0.001
            assert monotonic() < deadline

    def pass_time(self, seconds: float, *numbers: int) -> None:
        """Let time pass in which only these hosts call `step`."""
        end = self.time + seconds
        while self.time < end:
            self.time += 0.5
            for _ in range(5):
                self.step(*numbers)
                sleep(0.001)

    def lost(self, number: int) -> list[str]:
        return [m.reason for m in self.heard[number] if isinstance(m, HostLost)]

    def close(self) -> None:
        self.leader.close(None)
        self.member.close(None)


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.close()


def test_silent_host_0_is_lost_for_the_other_host(two: Two) -> None:
    two.pass_time(19, 1)
    assert two.lost(1) == []
    two.pass_time(3, 1)
    assert two.lost(1) == ["host h0 was lost: no heartbeat for 20 s"]
    assert two.member.over


def test_short_connection_loss_loses_no_message(two: Two) -> None:
    two.member.say(AttemptReady(0, 0))
    two.pass_time(15, 1)  # long enough for it to try another connection
    two.leader.say(AttemptReady(0, 40123))
    two.await_words(1, StartAttempt(0, "127.0.0.1", 40123))
    two.await_words(0, StartAttempt(0, "127.0.0.1", 40123))
    two.pass_time(30)
    assert two.lost(0) == two.lost(1) == []
    assert two.heard[1].count(StartAttempt(0, "127.0.0.1", 40123)) == 1


def test_result_reaches_all_hosts_before_host_0_ends(two: Two) -> None:
    two.member.say(HostEnded({"state": "succeeded"}, 0.0))
    two.pass_time(1)
    assert two.leader.over
    two.leader.close(RunOver({"state": "succeeded"}))
    two.pass_time(1, 1)
    assert RunOver({"state": "succeeded"}) in two.heard[1]
    assert two.lost(1) == []
