"""Recognise possible secrets by their name or form, so that they are not written to files.

Standard library only.
"""

from __future__ import annotations

import re

_ENDINGS = tuple(
    "TOKEN KEY SECRET PASSWORD PASSWD PASSPHRASE CREDENTIAL AUTH AUTHORIZATION COOKIE "
    "SECRETS CREDENTIALS COOKIES CREDS PASSCODE PGPASS SSHPASS JWT DSN WEBHOOK MNEMONIC".split()
)
_WHOLE = ("PASS", "PAT", "PWD", "KEYS", "SAS", "BEARER", "CONNSTR", "OTP", "TOTP")
_TOGETHER = re.compile("CONNECTION_?STRING|SEED_?PHRASE|PRIVATE_?PEM|WEBHOOK_?URL")
_HARMLESS = frozenset(
    "BOS CLS COLUMN EOS FEATURE GROUP IMAGE IMG INPUT LABEL MASK METRIC OUTPUT PAD SEP "
    "SORT SPECIAL TARGET TEXT UNK".split()
)
"""Words that make a name with KEY or TOKEN a name of data."""
_PART = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
FORMATS = {
    r"hf_[A-Za-z0-9]{16,}": "HF_TOKEN",
    r"gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}": "GITHUB_TOKEN",
    r"glpat-[\w-]{16,}": "GITLAB_TOKEN",
    r"sk-[\w-]{16,}": "OPENAI_API_KEY",
    r"xox[abeprs]-[\w-]{10,}": "SLACK_TOKEN",
    r"(?:https://)?hooks\.slack\.com/services/[\w/]+": "SLACK_WEBHOOK_URL",
    r"A(?:KI|SI)A[0-9A-Z]{16}": "AWS_ACCESS_KEY_ID",
    r"AIza[\w-]{30,}": "GOOGLE_API_KEY",
    r"ya29\.[\w-]{20,}": "GOOGLE_TOKEN",
    r"pypi-[\w-]{20,}": "PYPI_TOKEN",
    r"eyJ[\w-]{8,}(?:\.[\w-]+)+": "TOKEN",
}
"""Token formats of services, and the environment variable that usually holds such a token.

https://docs.github.com/code-security/secret-scanning has such lists.
"""
TOKEN = re.compile("|".join(rf"(?<![\w-])({pattern})" for pattern in FORMATS))
"""A token; the number of the group is that of its format."""
_PRIVATE = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]*:[^/\s@]+@")
"""Private keys, and URLs with a password."""
_FIELD = re.compile(r"['\"](\w+)['\"]\s*:\s*b?['\"]")
"""Matches 'api_key': '…' in a dict or in JSON."""
_PAIR = re.compile(r"(?:^|[?&;,\s])([\w.-]+)\s*=\s*[^\s&;,]")
"""Matches sig=… in a URL, AccountKey=… in a connection string, PASSWORD=… in settings."""
_SIGNATURES = frozenset(("SIG", "SIGNATURE"))
_USERINFO = re.compile(r"://[^/\s'\"]+@")
HIDDEN = "(not kept)"


def is_secret_name(name: str) -> bool:
    """True if a value of this name is assumed to be a secret: HF_TOKEN, --api-key, Authorization.

    Not TOKENIZERS_PARALLELISM, max_tokens, --pad-token: whole words of the name are compared.
    """
    parts = _words(name)
    if name == "PWD" or _HARMLESS.intersection(parts):
        return False
    if _TOGETHER.search("_".join(parts)):
        return True
    return any(part.endswith(_ENDINGS) or part in _WHOLE for part in parts)


def is_secret_text(text: str) -> bool:
    """True if a text has the form of a secret, or contains one."""
    found = TOKEN.search(text) or _PRIVATE.search(text)
    return found is not None or any(map(is_secret_name, _FIELD.findall(text)))


def kept_value(name: str, value: str) -> str:
    """Return the value of a variable as it may be written down: `HIDDEN` if it holds a secret.

    In a URL, only the user is left out, because it may be a token.
    """
    if is_secret_name(name):
        return HIDDEN
    value = _USERINFO.sub("://…@", value)
    pairs = _PAIR.findall(value)
    if any(is_secret_name(pair) or _SIGNATURES & {*_words(pair)} for pair in pairs):
        return HIDDEN
    return HIDDEN if is_secret_text(value) else value


def _words(name: str) -> list[str]:
    return [part.upper() for part in _PART.split(name) if part]
