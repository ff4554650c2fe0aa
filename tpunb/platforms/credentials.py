"""Which credentials are here: their names and places, never their values. No file is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpunb.platforms.problem import Problem

# In the order in which each library looks: kaggle 2.2.5, google-auth, huggingface_hub, wandb.
_VARIABLES: dict[str, tuple[str, ...]] = {
    "Kaggle": ("KAGGLE_API_V1_TOKEN", "KAGGLE_API_TOKEN", "KAGGLE_KEY"),
    "Google Cloud": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "Hugging Face": ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    "Weights & Biases": ("WANDB_API_KEY",),
}
_FILES: dict[str, tuple[str, ...]] = {
    "Kaggle": (
        ".kaggle/access_token", ".kaggle/access_token.txt", ".kaggle/kaggle.json",
        ".config/kaggle/kaggle.json", ".kaggle/credentials.json",
    ),
    "Google Cloud": (".config/gcloud/application_default_credentials.json",),
    "Hugging Face": (".cache/huggingface/token",),
    "Weights & Biases": (),
}  # fmt: skip


@dataclass(frozen=True)
class Credential:
    """One that was found."""

    service: str
    place: str
    """The variable's name, or the file's path."""
    open_to_others: bool = False
    """A file that other users of this machine can read."""


def find(env: Mapping[str, str]) -> list[Credential]:
    """Those that libraries would use, the first of each service."""
    home = Path(env.get("HOME", "~")).expanduser()
    return [found for service in _VARIABLES if (found := _of(service, env, home)) is not None]


def _of(service: str, env: Mapping[str, str], home: Path) -> Credential | None:
    for name in _VARIABLES[service]:
        if env.get(name):
            return Credential(service, name)
    for name in _FILES[service]:
        path = home / name
        if path.is_file():
            return Credential(service, str(path), bool(path.stat().st_mode & 0o077))
    return None


def problems(found: list[Credential]) -> Iterator[Problem]:
    """Files that others can read."""
    for one in found:
        if one.open_to_others:
            yield Problem(
                "credentials-open",
                f"{one.place} ({one.service}) can be read by other users of this machine.",
                f"`chmod 600 {one.place}`",
                must=False,
            )
