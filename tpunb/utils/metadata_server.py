"""Client of the metadata server of Google's machines: its address, and reading a value."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from pathlib import Path

NAME = "metadata.google.internal"
"""The host name, which torch_xla uses too."""


def metadata_host(env: Mapping[str, str], root: Path = Path("/")) -> str:
    """Return `host[:port]` of the server; '' on machines that are not Google's.

    No name is looked up. `root`: the folder of the machine's /sys. GCE_METADATA_HOST is the
    variable of Google's own libraries.
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
    """Read a value, such as 'instance/zone'; None if the server does not have it.

    `timeout`: seconds without a byte. Raises OSError without an answer, ValueError if the answer
    is not from a metadata server.
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
