"""The hours of TPU that Kaggle gives in a week: what is left of them.

One request of kagglesdk 0.1.37 (`GetAcceleratorQuotaStatistics`), without kagglesdk, whose import
takes longer than everything that `tpunb doctor` does.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Mapping
from typing import Any

from tpunb.errors import SetupError
from tpunb.price import Quota

PATIENCE = 1.0
"""Seconds until nothing is known."""
_METHOD = "kernels.KernelsApiService/GetAcceleratorQuotaStatistics"
_ENDPOINTS = {"LOCALHOST": "http://localhost/api/v1"}
"""By KAGGLE_API_ENVIRONMENT, as kagglesdk has them."""


class Asking:
    """Asks while other things are looked at. Outside of Kaggle, or without a login, for nothing."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._found: Quota | None = None
        self._thread = None
        if "KAGGLE_KERNEL_RUN_TYPE" in env:
            self._thread = threading.Thread(target=self._ask, args=[env], daemon=True)
            self._thread.start()

    def answer(self) -> Quota | None:
        """What is left; None where nobody says so in time."""
        if self._thread is not None:
            self._thread.join(PATIENCE)
        return self._found

    def _ask(self, env: Mapping[str, str]) -> None:
        if not (login := _login(env)):
            return
        from urllib.request import Request

        from tpunb.data import web

        endpoint = _ENDPOINTS.get(
            env.get("KAGGLE_API_ENVIRONMENT", ""), "https://api.kaggle.com/v1"
        )
        headers = {"Authorization": login, "Content-Type": "application/json"}
        request = Request(f"{endpoint}/{_METHOD}", b"{}", headers, method="POST")
        try:
            with web.ask(request, PATIENCE) as response:
                self._found = read(json.load(response))
        except (OSError, ValueError, KeyError):
            return  # no internet, no answer in time, or another answer: nothing is known


def read(answer: Mapping[str, Any]) -> Quota:
    """Kaggle's answer. Raises KeyError or ValueError for another one."""
    tpu = answer["tpuQuota"]
    return Quota(
        _seconds(tpu.get("timeUsed", "0s")),
        _seconds(tpu["totalTimeAllowed"]),
        str(answer.get("quotaRefreshTime", "")).partition("T")[0],
    )


def _seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def _login(env: Mapping[str, str]) -> str:
    """The header of a login that needs no further request; '' if there is none."""
    from tpunb.data import credentials

    try:
        known = credentials.find(env)
    except SetupError:  # others can read the file: that is told as a problem of its own
        return ""
    if known is None or known.login is not None:
        return ""
    if known.token is not None:
        return f"Bearer {known.token}"
    return "Basic " + base64.b64encode(f"{known.username}:{known.key}".encode()).decode()
