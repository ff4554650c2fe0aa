"""When the user must confirm the cost of a run at a place, and the effect of the answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import StdinNotImplementedError  # IPython's name for "no input here"

from tpunb.kernel import cost
from tpunb.kernel.options import TrainOptions
from tpunb.places.config import PlaceConfig, SshSettings
from tpunb.places.hosts_target import HostsTarget
from tpunb.places.target import Estimate
from tpunb.runs.spec import Price
from tpunb.utils.errors import TpunbError

PRICE = Price(10.0, "v6e-16", "2026-11-21", "a catalogue")


@dataclass(frozen=True)
class Target(HostsTarget):
    said: Estimate = field(default_factory=Estimate)

    @property
    def estimate(self) -> Estimate:
        return self.said


def target(ask_above: float | None, estimate: Estimate) -> Target:
    settings = SshSettings(hosts=("h0",), ask_above=ask_above)
    place = PlaceConfig("pod", "ssh", Path("places.toml"), settings)
    report: Any = None
    return Target(place, report, ("h0",), Path(), Path(), said=estimate)


class Asked:
    def __init__(self, answer: str | BaseException) -> None:
        self.answer = answer
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("ask_above", "estimate", "timeout", "asks"),
    [
        (None, Estimate(PRICE), None, False),
        (20.0, Estimate(PRICE), 7200.0, False),
        (19.9, Estimate(PRICE), 7200.0, True),
        (20.0, Estimate(PRICE), None, True),  # it may take any time
        (20.0, Estimate(unknown="no zone"), 60.0, True),
    ],
)
def test_cost_question_above_the_limit_of_the_place(
    ask_above: float | None, estimate: Estimate, timeout: float | None, asks: bool
) -> None:
    options = TrainOptions(timeout=timeout)
    asked = Asked("y")
    cost.confirm(target(ask_above, estimate), options, asked)
    assert bool(asked.prompts) is asks
    cost.confirm(target(ask_above, estimate), replace(options, yes=True), asked)
    assert len(asked.prompts) == asks


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("", "It may cost more than $20.00 (ask_above of [places.pod])"),
        ("no", "not started, as the answer was no"),
        (EOFError(), "there is no terminal or notebook to ask in: `%%tpu_train --yes` starts it"),
        # Nothing unfinished: ipykernel raises it if the front end takes no input.
        (StdinNotImplementedError(), "there is no terminal or notebook to ask in"),
        (KeyboardInterrupt(), "nothing was started"),
    ],
)
def test_cost_question_not_answered_yes_starts_nothing(
    answer: str | BaseException, told: str
) -> None:
    with pytest.raises(TpunbError) as raised:
        cost.confirm(target(20.0, Estimate(PRICE)), TrainOptions(), Asked(answer))
    assert told in str(raised.value)
