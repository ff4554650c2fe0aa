"""Functions for the shell lines, `%cd`, `%%writefile` and similar lines of an exported notebook.

Never imported: `export.py` copies the functions that a script uses into its header. A command
runs once on each host; the host's other ranks wait for it and use its result.
"""

import hashlib as _hashlib
import importlib as _importlib
import json as _json
import os as _os
import re as _re
import shlex as _shlex
import site as _site
import subprocess as _subprocess
import sys as _sys
import tempfile as _tempfile
from collections.abc import Callable as _Callable
from typing import Any as _Any


def _identity() -> list[str]:
    """Return values that identify this start of the script on this host."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    try:
        with open(f"/proc/{_os.getppid()}/stat") as file:
            began = file.read().rpartition(")")[2].split()[19]
    except OSError:  # not Linux
        began = ""
    known = [_os.environ.get(name, "") for name in names]
    return [*known, _os.uname().nodename, str(_os.getppid()), began]


def _meeting_place() -> str:
    """Return a folder shared by the processes of this start on this host; the last removes it."""
    import atexit
    import shutil

    name = _hashlib.sha256("\0".join(_identity()).encode()).hexdigest()[:16]
    folder = _os.path.join(_tempfile.gettempdir(), f"script-{_os.getuid()}-{name}")
    _os.makedirs(folder, mode=0o700, exist_ok=True)
    if _os.lstat(folder).st_uid != _os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    process, ranks = _os.getpid(), int(_os.environ["LOCAL_WORLD_SIZE"])

    def leave() -> None:
        if _os.getpid() == process:
            open(_os.path.join(folder, f"left-{process}"), "w").close()
            if sum(name.startswith("left-") for name in _os.listdir(folder)) == ranks:
                shutil.rmtree(folder, ignore_errors=True)

    atexit.register(leave)
    return folder


_STARTED_BY_SCRIPT = __name__ == "__mp_main__"  # multiprocessing runs the script once more
_ALONE = _STARTED_BY_SCRIPT or _os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
_MEETING = None if _ALONE else _meeting_place()
_VISITS: "dict[str, int]" = {}


def _setup_once(what: _Any, do: _Callable[[], _Any], again: bool = False) -> _Any:
    """Call `do` in the host's first process that reaches this line; all processes get its result.

    Processes that multiprocessing starts from the script call it only with `again`.
    """
    try:
        if _STARTED_BY_SCRIPT and not again:
            return [0, "", ""]
        if _MEETING is None:
            return do()
        import fcntl

        line = _setup_line()
        key = _hashlib.sha256(_json.dumps([line, _os.getcwd(), what]).encode()).hexdigest()
        _VISITS[key] = _VISITS.get(key, 0) + 1
        path = _os.path.join(_MEETING, f"{key[:16]}-{_VISITS[key]}")
        with open(path, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the process ends for any reason
            file.seek(0)
            if not (text := file.read()):
                try:
                    text = _json.dumps([do(), None])
                except OSError as error:
                    text = _json.dumps([None, [error.errno, error.strerror, error.filename]])
                file.write(text)
        result, failed = _json.loads(text)
        if failed:
            raise OSError(*failed)
        return result
    finally:
        _importlib.invalidate_caches()  # there may be new modules


def _setup_line() -> str:
    """Return the script's current line, as 'script.py, line 30: code'."""
    import linecache

    frame = _sys._getframe()
    while frame.f_code.co_name.startswith(("_setup_", "<lambda>")) and frame.f_back:
        frame = frame.f_back
    path, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, line).partition("; _prepare(")[0].strip()
    return f"{_os.path.basename(path)}, line {line}" + (f": {text}" if text else "")


def _setup_run(command: _Any, keep: str = "", text: "str | None" = None) -> "list[_Any]":
    """Run a command, with a shell if it is a string; return its status and the streams to `keep`.

    The programs of this interpreter come first in its PATH; it does not get the variables of ranks.
    """
    of_ranks = "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT ROLE_NAME".split()
    of_ranks += [f"{kind}_{name}" for kind in ("GROUP", "LOCAL", "ROLE") for name in of_ranks[:2]]
    env = {
        name: value
        for name, value in _os.environ.items()
        if name not in of_ranks and not name.startswith("TORCHELASTIC_")
    }
    folder = _os.path.dirname(_sys.executable)
    env["PATH"] = folder + _os.pathsep + env.get("PATH", _os.defpath)
    _sys.stdout.flush()
    _sys.stderr.flush()
    done = _subprocess.run(
        command,
        shell=isinstance(command, str),
        env=env,
        stdin=_subprocess.DEVNULL if text is None else None,
        input=text,
        stdout=_subprocess.PIPE if "out" in keep else None,
        stderr=(_subprocess.STDOUT if "both" in keep else _subprocess.PIPE)
        if "err" in keep or "both" in keep
        else None,
        encoding="utf-8",
        errors="replace",
    )
    return [done.returncode, done.stdout or "", done.stderr or ""]


def _setup_shell(command: str) -> None:
    """Run a `!command`. As in a notebook, a failure is reported, and the script continues."""
    line = _setup_line()

    def run() -> "list[_Any]":
        done = _setup_run(command)
        if done[0]:
            print(f"{line}: ended with status {done[0]}", file=_sys.stderr, flush=True)
        return done

    _setup_once(command, run)


def _setup_install(command: str) -> None:
    """Install packages for this interpreter. If that fails, the script ends."""
    pip = f"{_shlex.quote(_sys.executable)} -m pip "
    command = _re.sub(r"^\s*pip3?\s", lambda match: pip, command)
    status = _setup_once(command, lambda: _setup_run(command))[0]
    if status:
        raise SystemExit(
            f"{_setup_line()}: the installation ended with status {status}, so the script cannot "
            "continue. If the packages are installed, omit the line (tpunb convert --no-setup)"
        )
    for folder in {*_site.getsitepackages(), _site.getusersitepackages()}:
        if _os.path.isdir(folder):
            _site.addsitedir(folder)  # for a new folder, and for packages in development mode


class _Lines(list):  # type: ignore[type-arg]
    """A command's output lines, with the attributes of `x = !command` in a notebook."""

    def __reduce__(self) -> "tuple[_Any, ...]":
        return list, (self.l,)  # processes without this class get a list

    @property
    def l(self) -> "list[str]":  # noqa: E743
        return list(self)

    list = l

    @property
    def n(self) -> str:
        return "\n".join(self)

    nlstr = n

    @property
    def s(self) -> str:
        return " ".join(self)

    spstr = s

    @property
    def p(self) -> "_Any":
        import pathlib

        return [pathlib.Path(line) for line in self if _os.path.exists(line)]

    paths = p

    def sort(self, field: "int | None" = None, nums: bool = False) -> "_Lines":  # type: ignore[override]
        """Return the lines sorted, by the words of one column or by the number in them."""

        def key(line: str) -> "tuple[_Any, str]":
            parts = line if field is None else _Lines([line]).fields(field).l
            digits = "".join(part for part in parts if part.isdigit())
            return int(digits or 0) if nums else parts, line

        return _Lines(sorted(self, key=key))

    def grep(self, pattern: _Any, prune: bool = False, field: "int | None" = None) -> "_Lines":
        """Return lines that match a pattern or function; with `prune`, the other lines."""

        def found(line: str) -> bool:
            words = line.split()
            where = line if field is None else words[field] if field < len(words) else ""
            if callable(pattern):
                return bool(pattern(where))
            return _re.search(pattern, where, _re.IGNORECASE) is not None

        return _Lines(line for line in self if found(line) != prune)

    def fields(self, *columns: int) -> "_Lines":
        """Return each line's words in these columns, joined; without columns, lists of words."""
        words = [line.split() for line in self]
        if not columns:
            return _Lines(words)
        picked = ([row[at] for at in columns if -len(row) <= at < len(row)] for row in words)
        return _Lines(" ".join(row) for row in picked if row)


def _setup_output(command: str) -> _Lines:
    """Run `x = !command`; return the lines that it writes to stdout and stderr."""
    done = _setup_once(command, lambda: _setup_run(command, "out both"), again=True)
    return _Lines(done[1].splitlines())


def _setup_text(body: _Any) -> str:
    """Return the body of a cell magic, given as a string with a leading newline, or as lines."""
    return body[1:] + "\n" if isinstance(body, str) else "".join(f"{line}\n" for line in body)


def _setup_program(line: str, keep: str, check: bool, body: _Any) -> "list[str]":
    """Run `%%bash` or similar; return its output to the streams 'out' and 'err' in `keep`.

    Raises CalledProcessError if it fails, as in a notebook, unless `check` is false.
    """
    text = _setup_text(body)
    do = lambda: _setup_run(_shlex.split(line), keep, text)  # noqa: E731
    done = _setup_once([line, text], do, again=bool(keep))
    if check and done[0]:
        raise _subprocess.CalledProcessError(done[0], _shlex.split(line), done[1], done[2])
    return done[1:]  # type: ignore[no-any-return]


def _setup_file(path: str, mode: str, body: _Any) -> None:
    """Write a file, or append to it, as `%%writefile` does."""

    def write() -> None:
        with open(_os.path.expanduser(path), mode, encoding="utf-8") as file:
            file.write(_setup_text(body))

    _setup_once([path, mode, _setup_text(body)], write)


_FOLDERS: "list[str]" = []


def _setup_cd(path: str) -> None:
    """Change the working directory, as `%cd` does; a missing directory is reported and ignored."""
    before = _os.getcwd()
    if path == "-" and _FOLDERS:
        path = _FOLDERS[-1]
    try:
        _os.chdir(_os.path.expanduser(path or "~"))
    except OSError as error:
        print(f"{_setup_line()}: {error}", file=_sys.stderr, flush=True)
    else:
        _FOLDERS.append(before)


def _setup_secrets(*names: str) -> None:
    """End the script at its start if variables that replace secrets are not set."""
    missing = [name for name in names if name not in _os.environ]
    if missing:
        raise SystemExit(
            "the notebook contains secrets, which are not in this script. Set before the start: "
            + ", ".join(missing)
        )


def _setup_secret(name: str, plain: bool = False) -> str:
    """Return the value of a variable that replaces a secret; quoted for a shell unless `plain`."""
    value = _os.environ.get(name)
    if value is None:
        raise SystemExit(
            f"{_setup_line()}: the notebook has a secret here, which is not in this script. Set "
            f"it before the start: export {name}=…"
        )
    return value if plain else _shlex.quote(value)


def _setup_values(text: str, filled_in: _Callable[[], str]) -> str:
    """Fill in `{expression}` and `$name` in a command; unchanged if one of them has no value."""
    try:
        return filled_in()
    except Exception:  # as in IPython: text that is not a Python expression is for the shell
        return text
