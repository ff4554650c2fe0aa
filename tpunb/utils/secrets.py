"""Find secrets in texts by name, place and form, so that they are neither stored nor passed on.

False positives are preferred to missed secrets. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

HIDDEN = "…"
"""What is written in the place of a secret."""
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
_SIGNATURES = frozenset(("SIG", "SIGNATURE"))
"""Words of parameters of URLs that are secrets, too."""

_TOKENS = {
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
_ARGUMENTS = {
    r"\bwandb\s+login\s+(?:-\S+\s+)*([^\s-]\S*)": "WANDB_API_KEY",
    r"\bsshpass\s+-p\s*(\S+)": "SSHPASS",
    r"\b(?:curl|wget|http)\b.*?\s(?:-u|--user)[\s=]*([^\s:]+:\S+)": "LOGIN",
    r"\becho\s+([^|;&]*?)\s*\|[^|;&]*(?:--with-token|--password-stdin|\blogin\b|sudo\s+-S)": (
        "PASSWORD"
    ),
}
"""Arguments of programs that are secrets by their place."""
_FORMS = [
    *((re.compile(rf"(?<![\w-])({form})"), variable) for form, variable in _TOKENS.items()),
    *((re.compile(form), variable) for form, variable in _ARGUMENTS.items()),
]
"""Each with the secret as its group."""
_PRIVATE = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]*:[^/\s@]+@")
"""Private keys, and URLs with a password."""
_PRIVATE_KEY = re.compile(
    r"^.*-----BEGIN [A-Z ]*PRIVATE KEY(?s:.*?)(?:-----END [A-Z ]*PRIVATE KEY.*|\Z)", re.MULTILINE
)
_LOGIN = re.compile(r"(?<![a-z0-9+.-])([a-z0-9+.-]*)://([^\s/'\"]+)@([\w.-]*)", re.IGNORECASE)
_PAIR = re.compile(r"(?<![\w.-])(\bset\s+|-*)([\w.][\w.-]*)(\\?[\"'])?(\s*[:=]\s*|\s+)")
"""--name value, name=value, "name": "value", up to the value."""
_QUOTE = re.compile(r"b?(\\?[\"'])")
_SCHEME = re.compile(r"(?:Bearer|Basic|Token|Digest)\s+", re.IGNORECASE)
_PROGRAM = re.compile(r"\b(hf|huggingface-cli|wandb|kaggle|gh)\s[^|;&]*$")
"""A program with `--token` and similar options, and the text up to them."""
_PLAIN = re.compile(r"\d+(?:\.\d*)?|true|false|none|null|yes|no|auto|", re.IGNORECASE)
_PATH = re.compile(r"[~./].*|.*\.(?:json|pem|key|crt|txt|ya?ml|p12)", re.IGNORECASE)
_OF_PATHS = ("FILE", "PATH", "DIR", "CREDENTIALS")
_FILLED_IN = re.compile(r"\\?[\"']?(?:\{[^{}]*\}|\$\{?\w+\}?|\$\([^()]*\))\\?[\"']?")


class Secret(NamedTuple):
    """A secret in a text, from `start` to `end`."""

    start: int
    end: int
    variable: str
    """The environment variable that a script reads instead."""
    quote: str = ""
    """The shell's quotation mark around it, if any."""


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
    """True if a value has the form of a secret, or contains one: {'api_key': '…'}."""
    if _PRIVATE.search(text) or any(form.search(text) for form, _ in _FORMS[: len(_TOKENS)]):
        return True
    fields = (pair for pair in _pairs(text) if pair[3] and _QUOTE.match(text, pair.end()))
    return any(is_secret_name(pair[2]) for pair in fields)


def is_secret_value(name: str, value: str) -> bool:
    """True if the value of a variable or option in a command is a literal secret."""
    bare = value.strip("\\\"'")
    if _FILLED_IN.fullmatch(value) or not _names_secret(name):
        return False
    if name.upper().endswith(_OF_PATHS) and _PATH.fullmatch(bare):
        return False
    return not _PLAIN.fullmatch(bare) or ("PASS" in name.upper() and bool(bare))


def find_secrets(text: str) -> list[Secret]:
    """Return the secrets in a command or a line of a file, in order and without overlaps.

    A `{value}` or `$name` that is filled in is not a secret.
    """
    quotes = _open_quotes(text)
    found: list[Secret] = []
    for start, end, variable in sorted(_spans(text, quotes), key=lambda span: (span[0], -span[1])):
        if found and start < found[-1].end:
            found[-1] = found[-1]._replace(end=max(found[-1].end, end))
        elif start < end:
            found.append(Secret(start, end, variable, quotes[start]))
    return found


def without_secrets(text: str) -> str:
    """Replace the secrets of each line of commands or of a file by …, and private keys."""
    text = _PRIVATE_KEY.sub(lambda key: "\n".join([HIDDEN] * (key[0].count("\n") + 1)), text)
    lines = text.split("\n")
    for index, line in enumerate(lines):
        for secret in reversed(find_secrets(line)):
            line = line[: secret.start] + HIDDEN + line[secret.end :]
        lines[index] = line
    return "\n".join(lines)


def private_key(text: str) -> int | None:
    """Return the first line, from 0, of a private key in a text."""
    found = _PRIVATE_KEY.search(text)
    return None if found is None else text.count("\n", 0, found.start())


def kept_value(name: str, value: str) -> str:
    """Return the value of a variable as it may be written down: `HIDDEN` if it holds a secret.

    In a URL, only the user is left out, because it may be a token.
    """
    value = _LOGIN.sub(rf"\1://{HIDDEN}@\3", value)
    names = [name, *(pair[1] + pair[2] for pair in _pairs(value))]
    return HIDDEN if any(map(_names_secret, names)) or is_secret_text(value) else value


def _words(name: str) -> list[str]:
    return [part.upper() for part in _PART.split(name) if part]


def _names_secret(name: str) -> bool:
    return is_secret_name(name) or not _SIGNATURES.isdisjoint(_words(name))


def _pairs(text: str) -> Iterator[re.Match[str]]:
    at = 0
    while pair := _PAIR.search(text, at):
        at = pair.end(2)
        if pair[1] or pair[4].strip():  # not two words
            yield pair


def _spans(text: str, quotes: list[str]) -> Iterator[tuple[int, int, str]]:
    for form, variable in _FORMS:
        for match in form.finditer(text):
            bare = match[1].strip("\"'")
            start = match.start(1) + match[1].index(bare)
            if not _FILLED_IN.fullmatch(bare):
                yield start, start + len(bare), variable
    for match in _LOGIN.finditer(text):
        scheme, login, host = match.groups()
        user, _, password = login.rpartition(":")
        # The user in ssh://git@host is not a secret; the user in https://TOKEN@host is.
        if not _FILLED_IN.fullmatch(password) and (user or not scheme.lower().endswith("ssh")):
            yield *match.span(2), f"{_variable(host)}_LOGIN"
    for pair in _pairs(text):
        start, end = _value(text, pair, quotes)
        if is_secret_value(pair[2], text[start:end]):
            variable, program = _variable(pair[2]), _PROGRAM.search(text, 0, pair.start())
            if program and variable in ("TOKEN", "KEY", "API_KEY"):
                variable = f"{'HF' if program[1][0] == 'h' else program[1].upper()}_{variable}"
            yield start, end, variable


def _value(text: str, pair: re.Match[str], quotes: list[str]) -> tuple[int, int]:
    """Return the start and end of the value of a pair."""
    start = pair.end()
    opening = _QUOTE.match(text, start)
    if opening and not (quotes[start] and opening[0][0] == "b"):
        end = text.find(opening[1], opening.end())
        return opening.end(), len(text) if end < 0 else end
    if scheme := _SCHEME.match(text, start):
        start = scheme.end()
    around = quotes[start]
    if around and pair[4].strip() == ":":  # a header
        stops = around
    elif text[max(pair.start() - 1, 0)] in "?&":  # of a URL
        stops = r"&\s\"'#"
    else:
        stops = rf"\s{around}" if around else r"\s\"'|;<>)&"
    value = re.compile(rf"(?:\\.|[^\\{stops}])*").match(text, start)
    return start, value.end() if value else start


def _open_quotes(text: str) -> list[str]:
    """Return for each character of a command the quotation mark open at that point, or ''."""
    quotes, open_now, escaped = [], "", False
    for character in text:
        quotes.append(open_now)
        if escaped:
            escaped = False
        elif character == "\\" and open_now != "'":
            escaped = True
        elif character == open_now:
            open_now = ""
        elif not open_now and character in "\"'":
            open_now = character
    return [*quotes, open_now]


def _variable(name: str) -> str:
    return re.sub(r"\W+", "_", name).upper().strip("_")
