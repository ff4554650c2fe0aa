"""Known prices of TPU machines per hour.

Dollars per chip and hour, by generation and region, on demand and spot: from the catalogue that
SkyPilot makes of Google's price list (`SOURCE`), read on `DATE`. The price page itself was not
read; discounts, commitments and reservations are not included. Prices that the catalogue marks as
unknown (700.0) are left out. Kaggle and Colab do not bill machines by the hour.
"""

from __future__ import annotations

from tpunb.machine import tpu
from tpunb.machine.machine import Machine
from tpunb.runs.spec import Price

SOURCE = "skypilot-org/skypilot-catalog, catalogs/v8/gcp/vms.csv at 006059e"
DATE = "2026-11-21"

_Rates = dict[str, tuple[float, float | None]]
_RATES: dict[str, _Rates] = {
    "v4": {"us-central2": (3.22, 0.9215)},
    "v5e": {
        "asia-east1": (1.38948, 0.55579),
        "asia-northeast1": (1.54104, 0.4244),
        "asia-southeast1": (1.56, 0.78),
        "europe-north1": (1.32132, 0.66066),
        "europe-west1": (1.32132, 0.52853),
        "europe-west3": (1.416, 0.38997),
        "europe-west4": (1.56, 0.44498),
        "northamerica-northeast1": (1.32132, 0.36389),
        "southamerica-west1": (1.716, 0.47259),
        "us-central1": (1.2, 0.24493),
        "us-east1": (1.2, 0.24493),
        "us-east4": (1.2, 0.6),
        "us-east5": (1.2, 0.6),
        "us-south1": (1.416, 0.5664),
        "us-west1": (1.2, 0.24493),
        "us-west4": (1.2, 0.48),
    },
    "v5p": {
        "europe-west1": (4.45946, 1.78378),
        "europe-west4": (4.2525, 1.34849),
        "us-central1": (4.2, 0.8357),
        "us-east1": (4.2, 0.8357),
        "us-east5": (4.2, 1.68),
        "us-south1": (4.779, 1.31614),
    },
    "v6e": {
        "asia-northeast1": (3.24, 0.94352),
        "asia-south1": (3.24, 2.27),
        "asia-southeast1": (2.97, 0.36292),
        "europe-west4": (2.97, 1.03748),
        "southamerica-west1": (2.7, None),
        "us-central1": (2.7, 0.54421),
        "us-east1": (2.7, 0.54421),
        "us-east4": (2.7, 0.57766),
        "us-east5": (2.7, 1.215),
        "us-south1": (2.7, 1.35),
        "us-west1": (2.7, 0.54421),
    },
}


def price(accelerator_type: str, zone: str, spot: bool) -> Price | None:
    """The price of a whole slice in a zone; None if it is not known."""
    parsed = tpu.parse_accelerator_type(accelerator_type)
    if parsed is None:
        return None
    generation, count = parsed
    region = zone.rpartition("-")[0]
    by_use = _RATES.get(generation.name, {}).get(region)
    rate = by_use[spot] if by_use is not None else None
    if rate is None:
        return None
    what = f"{accelerator_type} in {region}, {'spot' if spot else 'on demand'}"
    return Price(round(rate * count, 4), what, DATE, SOURCE)


def price_of(machine: Machine) -> Price | None:
    """The price of this machine; None if its type or its price is not known."""
    if machine.platform not in ("gcp-tpu-vm", "gke"):
        return None
    metadata = machine.metadata
    zone = metadata.values.get("zone", "").rpartition("/")[2] or metadata.tpu_env.get("ZONE", "")
    spot = bool(machine.spot) or metadata.tpu_env.get("PREEMPTIBLE", "") == "true"
    return price(machine.accelerator_type, zone, spot)
