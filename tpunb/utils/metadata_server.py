"""The metadata server of Google's machines: where it is, and how one value is read from it."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from pathlib import Path

NAME = "metadata.google.internal"
"""The name that torch_xla asks for, too."""


def metadata_host(env: Mapping[str, str], root: Path = Path("/")) -> str:
    """`host[:port]` of the server; '' on a machine that is not Google's: no name is looked up.

    `root` is where the machine's /sys is. GCE_METADATA_HOST is the variable of Google's own
    libraries.
    """
    if host := env.get("GCE_METADATA_HOST"):
        return host
    try:
        # 'Google Compute Engine', or 'Google'
        product = (root / "sys/class/dmi/id/product_name").read_text()
    except OSError:
        return ""
    return NAME if product.startswith("Google") else ""


def read_metadata(host: str, key: str, timeout: float) -> str | None:
    """One value, such as 'instance/zone'; None where the server does not have it.

    `timeout`: seconds without a byte. Raises OSError if nobody answers, ValueError if what
    answers is not a metadata server.
    """
    connection = http.client.HTTPConnection(host, timeout=timeout)
    try:
        headers = {"Metadata-Flavor": "Google"}
        connection.request("GET", f"/computeMetadata/v1/{key}", headers=headers)
        response = connection.getresponse()
        value = response.read().decode("utf-8", "replace").strip()
    except http.client.HTTPException as error:
        raise ValueError(f"{host} is not a metadata server ({error})") from None
    finally:
        connection.close()
    if response.getheader("Metadata-Flavor") != "Google":
        raise ValueError(f"{host} is not a metadata server")
    return value if response.status == 200 else None
