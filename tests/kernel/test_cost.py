"""The cost of a run at a place: what is shown, when the user must confirm it, and the answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.error import StdinNotImplementedError  # IPython's name for "no input here"

from tpunb.kernel import cost
from tpunb.kernel.options import TrainOptions
from tpunb.places.config import PlaceConfig, SshSettings
from tpunb.places.hosts_target import HostsTarget
from tpunb.runs.spec import Price
from tpunb.utils.errors import TpunbError

PRICE = Price(10.0, "v6e-16", "2026-11-21", "a catalogue")


def target(ask_above: float | None, price: Price | None = PRICE) -> HostsTarget:
    place = PlaceConfig("pod", "ssh", Path(), SshSettings(hosts=("h0",), ask_above=ask_above))
    first = SimpleNamespace(price=price, machine=SimpleNamespace(device="TPU"))
    report: Any = SimpleNamespace(first=first)
    transport: Any = None
    return HostsTarget(place, report, transport, Path(), Path())


@pytest.mark.parametrize(
    ("ask_above", "price", "timeout", "asks", "shown"),
    [
        (None, PRICE, None, False, f"{PRICE}; no limit without --timeout"),
        (20.0, PRICE, 7200.0, False, f"{PRICE}; at most $20.00, in 2 h 00 min"),
        (19.9, PRICE, 7200.0, True, f"{PRICE}; at most $20.00, in 2 h 00 min"),
        (20.0, PRICE, None, True, f"{PRICE}; no limit without --timeout"),
        (20.0, None, 60.0, True, "the cost is not known: the price list does not cover"),
    ],
)
def test_cost_question_above_the_limit_of_the_place(
    ask_above: float | None, price: Price | None, timeout: float | None, asks: bool, shown: str
) -> None:
    place = target(ask_above, price)
    prompts: list[str] = []

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        return "y"

    assert cost.describe(place, timeout).startswith(shown)
    for yes in (False, True):
        cost.confirm(place, TrainOptions(timeout=timeout, yes=yes), ask)
    assert len(prompts) == asks


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("no", r"as the answer was no.*\. It may cost more than \$20\.00 \(ask_above of \[pl"),
        (EOFError(), "is no terminal or notebook to ask in: `%%tpu_train --yes` starts it"),
        # Nothing unfinished: ipykernel raises it if the front end takes no input.
        (StdinNotImplementedError(), "is no terminal or notebook to ask in"),
        (KeyboardInterrupt(), "nothing was started"),
    ],
)
def test_cost_question_not_answered_yes_starts_nothing(answer: Any, told: str) -> None:
    def answered(prompt: str) -> str:
        if isinstance(answer, str):
            return answer
        raise answer

    with pytest.raises(TpunbError, match=told):
        cost.confirm(target(20.0), TrainOptions(), answered)
