"""Convert shell lines, `%env`, `%cd`, `%%writefile` and similar to Python.

A train cell's lines, and those of functions that it calls, run in each rank. Those of the cells
above have run in the notebook: a run leaves them out, except for `%cd`, because their effects exist
on this machine.
On another machine they do not, so an exported script performs them itself. All call functions of
the script's header (`templates/header/helpers.py`). In exported scripts, secrets become environment
variables.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from tpunb.notebook.convert import magics, syntax
from tpunb.notebook.convert.syntax import Special
from tpunb.utils.secrets import find_secrets, is_secret_value

_INSTALLS = re.compile(
    r"(?:^|[;&|(])\s*(?:sudo\s+|\w+=\S+\s+)*(?:(?:\S*/)?python[\d.]*\s+-m\s+)?"
    r"(?:uv\s+)?(?:pip3?|conda|mamba|micromamba|uv)\s+(?:-\S+\s+)*(?:install|create|add|sync|update)\b"
)
"""Commands whose failure ends the script, which would otherwise fail later and less clearly."""
_OF_SYSTEM = re.compile(
    r"(?:^|[;&|(])\s*(?:sudo\s+|\w+=\S+\s+)*(?:apt|apt-get|dpkg|yum|dnf|apk|snap)\s+"
    r"(?:-\S+\s+)*(?:-i|add|install|update|upgrade)\b"
)
"""Commands that install packages of the operating system."""
BEGIN, END = '_TPUNB_STATE["training"] = True', '_TPUNB_STATE["training"] = False'
"""Statements around a train cell, whose lines run in each rank."""
_COMMANDS = ("ls", "mkdir", "rm", "rmdir", "cp", "mv", "cat", "pip")
"""Line magics that are commands of the same name."""
_CONDA = ("conda", "mamba", "micromamba")
_OPTION = re.compile(r"--(?:(out|err|proc)[ =]\s*(\w+)|(bg|no-raise-error))(?=\s|$)\s*")
_CELL_MARK = re.compile(r"\s*(?:#\s*)?%%")
READS_SECRET = re.compile(r"_tpunb_setup_secret\('(\w+)'")
"""Matches where code reads a secret; the group is its environment variable."""
_FIRST_MARK = 0xF0000
"""First of the private-use Unicode characters that mark secrets while a text is parsed."""


@dataclass
class SetupCode:
    """Python code for one use of special syntax."""

    secrets: dict[str, str] | None
    """Secrets by the environment variables that replace them, to which those found in it are added;
    None if they stay."""
    lines: list[str] = field(default_factory=list)

    def command(self, text: str, *, plain: bool = False) -> str:
        """Return the expression for a command or path, with `{expression}` and `$name` filled in.

        With `plain` it is not for a shell, so secrets in it are not quoted.
        """
        marked, variables = self._marked(text)
        literal = _expression(marked, variables, plain)
        filled_in = syntax.interpolated(
            marked, lambda part: _expression(part, variables, plain), strict=True
        )
        return (
            literal
            if filled_in == literal
            else f"_tpunb_setup_values({literal}, lambda: {filled_in})"
        )

    def body(self, start: str, body: Sequence[str], after: str = "", *, plain: bool) -> None:
        """Write lines that pass the body of a cell magic to a call, line for line."""
        # As in a notebook, the text ends with a newline, also if the cell does not.
        end = "\n" if body and body[-1] else ""
        marked = [self._marked(line) for line in body]
        if not any(variables for _, variables in marked) and (mark := _raw_quotes(body)):
            more = f"[1:] + {end!r}" if end else "[1:]"
            self.lines = [f"{start}r{mark}", *body[:-1], f"{body[-1]}{mark}{more}){after}"]
            return
        ends = ["\n"] * (len(body) - 1) + [end]
        texts = [
            _expression(f"{line}{end}", variables, plain)
            for (line, variables), end in zip(marked, ends, strict=True)
        ]
        self.lines = [f"{start}''", *(f"    + {text}" for text in texts)]
        self.lines[-1] += f"){after}"

    def _marked(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        """Replace each secret by a mark; also return their variables and surrounding quotes."""
        found = [] if self.secrets is None else find_secrets(text)
        variables = [
            (self.variable(secret.variable, text[secret.start : secret.end]), secret.quote)
            for secret in found
        ]
        for at, secret in reversed(list(enumerate(found))):
            text = text[: secret.start] + chr(_FIRST_MARK + at) + text[secret.end :]
        return text, variables

    def variable(self, name: str, value: str) -> str:
        """Return the variable for a secret: `name`, with a number if another secret has it."""
        assert self.secrets is not None
        known, count = name, 1
        while self.secrets.setdefault(name, value) != value:
            count += 1
            name = f"{known}_{count}"
        return name


def _expression(marked: str, variables: Sequence[tuple[str, str]], plain: bool) -> str:
    parts, literal = [], ""
    for character in marked:
        at = ord(character) - _FIRST_MARK
        if not 0 <= at < len(variables):
            literal += character
            continue
        name, quote = variables[at]
        # Inside shell quotes: close them before the quoted value and open them again after it.
        before = literal if plain else literal + quote
        parts += [repr(before)] if before else []
        parts.append(secret_expression(name, plain))
        literal = "" if plain else quote
    return " + ".join([*parts, repr(literal)] if literal or not parts else parts)


def secret_expression(name: str, plain: bool) -> str:
    return f"_tpunb_setup_secret({name!r}{', plain=True' if plain else ''})"


def _raw_quotes(body: Sequence[str]) -> str | None:
    """Return the quotes for a raw string of these lines; None if no raw string is possible."""
    text = "\n".join(body)
    odd = not body or not all(c.isprintable() or c in "\n\t" for c in text)
    if odd or any(_CELL_MARK.match(line) for line in body):
        return None
    for mark in ("'''", '"""'):
        if mark not in text and not text.endswith(("\\", mark[0])):
            return mark
    return None


def installs(command: str) -> bool:
    """True for a command that installs packages."""
    return bool(_INSTALLS.search(command) or _OF_SYSTEM.search(command))


def line_code(special: Special, secrets: dict[str, str] | None) -> SetupCode | None:
    """Convert a shell line or line magic to Python; None if a script does not need it."""
    code, name, argument = SetupCode(secrets), special.name, special.argument
    if special.kind in ("shell", "capture") or name in ("system", "sx"):
        statement = _run(code, argument)
    elif name in _COMMANDS:
        statement = _run(code, f"{name} {argument}")
    elif name in _CONDA:
        verb, _, rest = argument.partition(" ")
        asks = verb in ("install", "create", "remove", "uninstall", "update", "upgrade")
        yes = " --yes" if asks and not re.search(r"(?:^|\s)(?:-y|--yes)\b", rest) else ""
        statement = _run(code, f"{name} {verb}{yes} {rest}")
    elif name == "uv":
        statement = _run(code, f"python -m uv {argument}")
    elif name in ("env", "set_env"):
        statement = _set_variable(code, argument)
    elif name in magics.CHANGE_FOLDER:
        statement = _change_folder(code, "-" if name == "popd" else argument)
    else:
        return None
    code.lines = [statement]
    return code if statement else None


def output_code(command: str, secrets: dict[str, str] | None) -> SetupCode:
    """Return the expression for `x = !command`."""
    code = SetupCode(secrets)
    code.lines = [f"_tpunb_setup_output({code.command(command)})"]
    return code


def cell_code(
    name: str, argument: str, body: Sequence[str], secrets: dict[str, str] | None
) -> SetupCode | None:
    """Convert a cell magic and its body, line for line; None if a script does not need it."""
    code = SetupCode(secrets)
    if name in ("writefile", "file"):
        words = [word for word in argument.split() if word not in ("-a", "--append")]
        mode = "a" if len(words) < len(argument.split()) else "w"
        path = code.command(_unquoted(" ".join(words)), plain=True)
        code.body(f"_tpunb_setup_file({path}, {mode!r}, ", body, plain=True)
    elif name in ("system", "sx", "!"):
        code.body("_tpunb_setup_shell(['sh'], text=", body, plain=False)
    elif name in magics.SUBPROCESSES:
        options = _OPTION.findall(argument)
        if any(kind == "proc" or flag == "bg" for kind, _, flag in options):
            return None
        kept = {kind: variable for kind, variable, _ in options if kind}
        rest = _OPTION.sub("", argument).strip()
        line = code.command(rest if name == "script" else f"{name} {rest}".strip())
        check = not any(flag for *_, flag in options)
        target = ", ".join(kept[kind] for kind in ("out", "err") if kind in kept)
        before = f"{target} = " if target else ""
        options = [f"keep={' '.join(kept)!r}, "] if kept else []
        options += ["must=True, "] if check else []
        if "_tpunb_setup_" in line:  # with values that are only known when it runs
            line = f"({line}).split()"
        else:
            line = repr(shlex.split(ast.literal_eval(line)))
        start = f"{before}_tpunb_setup_shell({line}, {''.join(options)}text="
        end = {("out",): "[0]", ("err",): "[1]"}.get(tuple(kept), "")
        program = (rest.split() or [""])[0] if name == "script" else name
        code.body(start, body, end, plain=program not in ("sh", "bash"))
    else:
        return None
    return code


def _run(code: SetupCode, command: str) -> str:
    function = "_tpunb_setup_install" if _INSTALLS.search(command) else "_tpunb_setup_shell"
    command = re.sub(r"^\s*pip3?\s", "pip ", command)
    return f"{function}({code.command(command)})"


def _set_variable(code: SetupCode, argument: str) -> str:
    """Convert `%env NAME=value`, split as in IPython; '' if it only displays a value."""
    name, sign, value = argument.partition("=" if "=" in argument else " ")
    name, value = name.strip(), value.strip()
    if not sign or not name or len(name.split()) > 1:
        return ""
    if code.secrets is not None and is_secret_value(name, value):
        expression = secret_expression(code.variable(name, value), plain=True)
    else:
        expression = code.command(value, plain=True)
    return f"os.environ[{code.command(name, plain=True)}] = {expression}"


def _change_folder(code: SetupCode, argument: str) -> str:
    """Convert `%cd PATH`; '' for bookmarks and `%cd`'s history, which only the notebook has."""
    path = re.sub(r"^-q(?:\s+|$)", "", argument)
    if path.startswith("-") and path != "-":
        return ""
    return f"_tpunb_setup_cd({code.command(_unquoted(path), plain=True)})"


def _unquoted(path: str) -> str:
    return path[1:-1] if len(path) > 1 and path[0] == path[-1] and path[0] in "\"'" else path
