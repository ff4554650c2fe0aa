from __future__ import annotations

import pytest

from tests.machine.test_machine import pci
from tpunb.machine import machine, prices
from tpunb.machine.metadata import Metadata


@pytest.mark.parametrize(
    ("accelerator", "zone", "spot", "per_hour"),
    [
        # The catalogue's own prices of whole machines.
        ("v4-8", "us-central2-b", False, 12.88),
        ("v5litepod-1", "us-west4-a", False, 1.2),
        ("v5litepod-8", "asia-northeast1-b", False, 12.3283),
        ("v5p-8", "us-east5-a", False, 16.8),
        ("v6e-8", "us-east5-b", True, 9.72),
    ],
)
def test_prices(accelerator: str, zone: str, spot: bool, per_hour: float) -> None:
    found = prices.price(accelerator, zone, spot)
    assert found is not None
    assert found.per_hour == pytest.approx(per_hour, abs=2e-4)
    assert found.date == "2026-11-21"


@pytest.mark.parametrize(
    ("accelerator", "zone", "spot"),
    [
        ("v3-8", "us-east1-d", False),
        ("v6e-8", "southamerica-west1-a", True),
        ("v5litepod-8", "mars-north1-a", False),
        ("tpu7x-8", "us-central1-a", False),
    ],
)
def test_what_is_not_known_is_not_guessed(accelerator: str, zone: str, spot: bool) -> None:
    assert prices.price(accelerator, zone, spot) is None


def test_in_words() -> None:
    found = prices.price("v5litepod-8", "us-west4-a", False)
    assert found is not None
    assert found.describe_cost(1800) == (
        "cost: about $4.80 (v5litepod-8 in us-west4, on demand: $9.60 an hour, as of 2026-11-21)"
    )
    assert found.describe_cost(1).startswith("cost: less than $0.01")


def test_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = pci(tmp_path_factory.mktemp("root"), *[("0x1ae0", "0x0063")] * 8)
    values = {
        "accelerator-type": "v5litepod-8",
        "zone": "projects/123/zones/us-west4-a",
        "preemptible": "FALSE",
        "tpu-env": "ZONE: 'us-west4-a'\nPREEMPTIBLE: 'false'\n",
    }
    here = machine.machine_from_metadata({}, root, Metadata("answers", values))
    found = prices.price_of(here)
    assert found is not None
    assert found.per_hour == 9.6
    spot = Metadata("answers", values | {"preemptible": "TRUE"})
    found = prices.price_of(machine.machine_from_metadata({}, root, spot))
    assert found is not None
    assert found.per_hour == 3.84
    assert found.what == "v5litepod-8 in us-west4, spot"
    colab = machine.machine_from_metadata(
        {"COLAB_RELEASE_TAG": "x"}, root, Metadata("answers", values)
    )
    assert prices.price_of(colab) is None
    assert prices.price_of(machine.machine_from_metadata({}, root, Metadata())) is None
