"""Find secrets in setup lines by their position and their format.

A script that is passed on must not contain secrets: it reads each from an environment variable.
False positives are preferred to missed secrets; a `{value}` or `$name` does not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpunb.utils.secrets import FORMATS, TOKEN, is_secret_name

HIDDEN = "…"


@dataclass(frozen=True)
class Secret:
    """A secret in a text, from `start` to `end`."""

    start: int
    end: int
    variable: str
    """The environment variable that a script reads instead."""
    quote: str = ""
    """The shell's quotation mark around it, if any."""


_USERINFO = re.compile(r"\b([a-z][a-z0-9+.-]*)://([^\s/'\"]+)@([\w.-]+)", re.IGNORECASE)
_PAIR = re.compile(r"(?<![\w-])(\bset\s+|-{0,2})([A-Za-z][\w.-]*)(\\?[\"'])?(\s*[:=]\s*|\s+)")
_SCHEME = re.compile(r"(?:Bearer|Basic|Token|Digest)\s+", re.IGNORECASE)
_POSITIONAL = re.compile(
    r"\bwandb\s+login\s+(?:-\S+\s+)*(?P<WANDB_API_KEY>[^\s-]\S*)"
    r"|\bsshpass\s+-p\s*(?P<SSHPASS>\S+)"
    r"|\b(?:curl|wget|http)\b.*?\s(?:-u|--user)[\s=]*(?P<LOGIN>[^\s:]+:\S+)"
    r"|\becho\s+(?P<PASSWORD>[^|;&]*?)\s*\|[^|;&]*(?:--with-token|--password-stdin|\blogin\b|sudo\s+-S)"
)
_PROGRAMS = {"hf": "HF", "huggingface-cli": "HF", "wandb": "WANDB", "kaggle": "KAGGLE", "gh": "GH"}
"""Prefixes of the environment variables of programs with `--token` and similar options."""
_PLAIN = re.compile(r"\d+(?:\.\d*)?|true|false|none|null|yes|no|auto|", re.IGNORECASE)
_PATH = re.compile(r"[~./].*|.*\.(?:json|pem|key|crt|txt|ya?ml|p12)", re.IGNORECASE)
_OF_PATHS = ("FILE", "PATH", "DIR", "CREDENTIALS")
_KEY_BEGINS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_KEY_ENDS = re.compile(r"-----END [A-Z ]*PRIVATE KEY-----")
_FILLED_IN = re.compile(r"\\?[\"']?(?:\{[^{}]*\}|\$\{?\w+\}?|\$\([^()]*\))\\?[\"']?")


def find_secrets(text: str) -> list[Secret]:
    """Return the secrets in a command or a written text, in order and without overlaps."""
    found = sorted(_candidates(text), key=lambda each: (each.start, -each.end))
    kept: list[Secret] = []
    for each in found:
        if kept and each.start < kept[-1].end:
            last = kept[-1]
            end = max(last.end, each.end)
            kept[-1] = Secret(last.start, end, last.variable, last.quote)
        elif each.end > each.start:
            kept.append(each)
    return kept


def without_secrets(text: str) -> str:
    """Replace each secret in a text by …, for comments and messages."""
    for secret in reversed(find_secrets(text)):
        text = text[: secret.start] + HIDDEN + text[secret.end :]
    return text


def private_keys(lines: Sequence[str]) -> list[int]:
    """Return the indices of lines that are part of a private key in PEM format."""
    found, inside = [], False
    for index, line in enumerate(lines):
        inside |= _KEY_BEGINS.search(line) is not None
        found += [index] if inside else []
        inside &= _KEY_ENDS.search(line) is None
    return found


def is_secret_value(name: str, value: str) -> bool:
    """True if the value of a variable or option is a literal secret."""
    bare = value.strip("\\\"'")
    if not is_secret_name(name) or _FILLED_IN.fullmatch(value):
        return False
    if name.upper().endswith(_OF_PATHS) and _PATH.fullmatch(bare):
        return False
    return not _PLAIN.fullmatch(bare) or ("PASS" in name.upper() and bool(bare))


def _candidates(text: str) -> Iterator[Secret]:
    quotes = _open_quotes(text)
    for match in TOKEN.finditer(text):
        variable = list(FORMATS.values())[(match.lastindex or 1) - 1]
        yield Secret(match.start(), match.end(), variable, quotes[match.start()])
    for match in _USERINFO.finditer(text):
        scheme, login, host = match.groups()
        user, _, password = login.rpartition(":")
        # The user in ssh://git@host is not a secret; the user in https://TOKEN@host is.
        if _FILLED_IN.fullmatch(password) or (not user and scheme.lower().endswith("ssh")):
            continue
        yield Secret(*match.span(2), f"{_variable(host)}_LOGIN", quotes[match.start(2)])
    for match in _POSITIONAL.finditer(text):
        for variable, value in match.groupdict().items():
            bare = (value or "").strip("\"'")
            if bare and not _FILLED_IN.fullmatch(bare):
                start = match.start(variable) + (value or "").index(bare)
                yield Secret(start, start + len(bare), variable, quotes[start])
    at = 0
    while pair := _PAIR.search(text, at):
        at = pair.end(2)
        dashes, name, _, between = pair.groups()
        if not between.strip() and not dashes:
            continue  # two words
        start, end = _value(text, pair, quotes)
        if is_secret_value(name, text[start:end]):
            at = end
            yield Secret(start, end, _named(name, text[: pair.start()]), quotes[start])


def _value(text: str, match: re.Match[str], quotes: list[str]) -> tuple[int, int]:
    """Return the start and end of the value of a pair."""
    start = match.end()
    if opening := re.compile(r"\\?[\"']").match(text, start):
        start = opening.end()
        end = text.find(opening[0], start)
        return start, len(text) if end < 0 else end
    if scheme := _SCHEME.match(text, start):
        start = scheme.end()
    around, separator = quotes[start] if start < len(text) else "", match[4].strip()
    if around and separator == ":":  # a header
        stops = around
    elif text[max(match.start() - 1, 0)] in "?&":  # of a URL
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


def _named(name: str, before: str) -> str:
    """Return the variable for an option: HF_TOKEN for the `--token` of huggingface-cli."""
    variable = _variable(name)
    if variable in ("TOKEN", "KEY", "API_KEY"):
        for word in re.split(r"[\s|;&]+", before):
            if word in _PROGRAMS:
                return f"{_PROGRAMS[word]}_{variable}"
    return variable
