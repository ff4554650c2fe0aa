"""Functions for the shell lines, `%cd`, `%%writefile` and similar lines of a notebook.

Never imported: `export.py` copies the functions that a script uses into its header. A train cell's
commands run in each rank. The commands of the cells above run once on each host, whose other ranks
wait for them and use their results; in a run that the notebook starts, they have run there.
"""

import contextlib as _tpunb_contextlib
import hashlib as _tpunb_hashlib
import importlib as _tpunb_importlib
import json as _tpunb_json
import os as _tpunb_os
import re as _tpunb_re
import shlex as _tpunb_shlex
import signal as _tpunb_signal
import site as _tpunb_site
import subprocess as _tpunb_subprocess
import sys as _tpunb_sys
import tempfile as _tpunb_tempfile
import time as _tpunb_time
from collections.abc import Callable as _TpunbCallable
from collections.abc import Iterator as _TpunbIterator
from typing import Any as _TpunbAny


def _tpunb_identity() -> list[str]:
    """Return values that identify this start of the script on this host."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    try:
        with open(f"/proc/{_tpunb_os.getppid()}/stat") as file:
            began = file.read().rpartition(")")[2].split()[19]
    except OSError:  # not Linux
        began = ""
    known = [_tpunb_os.environ.get(name, "") for name in names]
    return [*known, _tpunb_os.uname().nodename, str(_tpunb_os.getppid()), began]


def _tpunb_meeting_place() -> str:
    """Return a folder shared by the processes of this start on this host; the last removes it."""
    import atexit
    import shutil

    name = _tpunb_hashlib.sha256("\0".join(_tpunb_identity()).encode()).hexdigest()[:16]
    folder = _tpunb_os.path.join(
        _tpunb_tempfile.gettempdir(), f"script-{_tpunb_os.getuid()}-{name}"
    )
    _tpunb_os.makedirs(folder, mode=0o700, exist_ok=True)
    if _tpunb_os.lstat(folder).st_uid != _tpunb_os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    process, ranks = _tpunb_os.getpid(), int(_tpunb_os.environ["LOCAL_WORLD_SIZE"])

    def leave() -> None:
        if _tpunb_os.getpid() == process:
            open(_tpunb_os.path.join(folder, f"left-{process}"), "w").close()
            if sum(name.startswith("left-") for name in _tpunb_os.listdir(folder)) == ranks:
                shutil.rmtree(folder, ignore_errors=True)

    atexit.register(leave)
    return folder


_TPUNB_STARTED_BY_SCRIPT = __name__ == "__mp_main__"  # multiprocessing runs the script once more
_TPUNB_DONE = False  # whether the lines above the train cell have run, in the notebook
_TPUNB_STATE = {"training": False}
_TPUNB_ALONE = (
    _TPUNB_DONE or _TPUNB_STARTED_BY_SCRIPT or _tpunb_os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
)
_TPUNB_MEETING = None if _TPUNB_ALONE else _tpunb_meeting_place()
_TPUNB_VISITS: dict[str, int] = {}


def _tpunb_setup_once(
    what: _TpunbAny, do: _TpunbCallable[[], _TpunbAny], again: bool = False
) -> _TpunbAny:
    """Call `do` in the host's first process that reaches this line; all processes get its result.

    In a train cell, each process calls it. Processes that multiprocessing starts from the script,
    and cells that have run in the notebook, call it only with `again`: they need the result.
    """
    training = _TPUNB_STATE["training"]
    try:
        if (_TPUNB_STARTED_BY_SCRIPT or (_TPUNB_DONE and not training)) and not again:
            return [0, "", ""]
        if training or _TPUNB_MEETING is None:
            return do()
        import fcntl

        line = _tpunb_setup_line()
        key = _tpunb_hashlib.sha256(
            _tpunb_json.dumps([line, _tpunb_os.getcwd(), what]).encode()
        ).hexdigest()
        _TPUNB_VISITS[key] = _TPUNB_VISITS.get(key, 0) + 1
        path = _tpunb_os.path.join(_TPUNB_MEETING, f"{key[:16]}-{_TPUNB_VISITS[key]}")
        with open(path, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the process ends for any reason
            file.seek(0)
            if not (text := file.read()):
                try:
                    text = _tpunb_json.dumps([do(), None])
                except OSError as error:
                    text = _tpunb_json.dumps([None, [error.errno, error.strerror, error.filename]])
                file.write(text)
        result, failed = _tpunb_json.loads(text)
        if failed:
            raise OSError(*failed)
        return result
    finally:
        _tpunb_importlib.invalidate_caches()  # there may be new modules


def _tpunb_setup_line() -> str:
    """Return the script's current line, as 'script.py, line 30: code'."""
    import linecache

    frame = _tpunb_sys._getframe()
    while frame.f_code.co_name.startswith(("_tpunb_setup_", "<lambda>")) and frame.f_back:
        frame = frame.f_back
    path, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, line).partition("; _tpunb_")[0].strip()
    return f"{_tpunb_os.path.basename(path)}, line {line}" + (f": {text}" if text else "")


def _tpunb_setup_run(
    command: _TpunbAny, keep: str = "", text: str | None = None
) -> list[_TpunbAny]:
    """Run a command, with a shell if it is a string; return its status and the streams to `keep`.

    The programs of this interpreter come first in its PATH; it does not get the variables of ranks.
    In a train cell it has this process's variables. An interrupt ends all of its processes.
    """
    import shutil

    shell = isinstance(command, str)
    of_ranks = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME"]
    of_ranks += [f"{kind}_{name}" for kind in ("GROUP", "LOCAL", "ROLE") for name in of_ranks[:2]]
    env = {
        name: value
        for name, value in _tpunb_os.environ.items()
        if name not in of_ranks and not name.startswith("TORCHELASTIC_")
    }
    folder = _tpunb_os.path.dirname(_tpunb_sys.executable)
    env["PATH"] = folder + _tpunb_os.pathsep + env.get("PATH", _tpunb_os.defpath)
    _tpunb_sys.stdout.flush()
    _tpunb_sys.stderr.flush()
    with _tpunb_subprocess.Popen(
        command,
        shell=shell,
        # As in a notebook.
        executable=shutil.which(_tpunb_os.environ.get("SHELL", "sh")) if shell else None,
        env=None if _TPUNB_STATE["training"] else env,
        start_new_session=True,  # so that its own children can be ended with it
        stdin=_tpunb_subprocess.DEVNULL if text is None else _tpunb_subprocess.PIPE,
        stdout=_tpunb_subprocess.PIPE if "out" in keep else None,
        stderr=(_tpunb_subprocess.STDOUT if "both" in keep else _tpunb_subprocess.PIPE)
        if "err" in keep or "both" in keep
        else None,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            out, err = process.communicate(text)
        except BaseException:
            for number in (_tpunb_signal.SIGINT, _tpunb_signal.SIGKILL):
                try:
                    _tpunb_os.killpg(process.pid, number)
                    process.wait(1)
                except (ProcessLookupError, _tpunb_subprocess.TimeoutExpired):
                    continue
            raise
    return [process.returncode, out or "", err or ""]


def _tpunb_setup_shell(command: str) -> None:
    """Run a `!command`. As in a notebook, the script continues after a failure."""
    line = _tpunb_setup_line()

    def run() -> list[_TpunbAny]:
        done = _tpunb_setup_run(command)
        if done[0] and not _TPUNB_STATE["training"]:
            print(f"{line}: ended with status {done[0]}", file=_tpunb_sys.stderr, flush=True)
        return done

    status = _tpunb_setup_once(command, run)[0]
    globals()["_exit_code"] = status if status <= 128 else 128 - status  # as IPython has it


def _tpunb_setup_install(command: str) -> None:
    """Install packages for this interpreter. If that fails, the script ends."""
    if _TPUNB_STATE["training"]:
        raise RuntimeError("install packages in a cell above the train cell, not in each rank")
    pip = f"{_tpunb_shlex.quote(_tpunb_sys.executable)} -m pip "
    command = _tpunb_re.sub(r"^\s*pip3?\s", lambda match: pip, command)
    status = _tpunb_setup_once(command, lambda: _tpunb_setup_run(command))[0]
    if status:
        raise SystemExit(
            f"{_tpunb_setup_line()}: the installation ended with status {status}, so the script "
            "cannot continue. If the packages are installed, omit the line "
            "(tpunb convert --no-setup)"
        )
    for folder in {*_tpunb_site.getsitepackages(), _tpunb_site.getusersitepackages()}:
        if _tpunb_os.path.isdir(folder):
            _tpunb_site.addsitedir(folder)  # for a new folder, and for packages in development mode


class _TpunbLines(list):  # type: ignore[type-arg]
    """A command's output lines, with the attributes of `x = !command` in a notebook."""

    def __reduce__(self) -> tuple[_TpunbAny, ...]:
        return list, (self.l,)  # processes without this class get a list

    @property
    def l(self) -> list[str]:  # noqa: E743
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
    def p(self) -> _TpunbAny:
        import pathlib

        return [pathlib.Path(line) for line in self if _tpunb_os.path.exists(line)]

    paths = p

    def sort(self, field: _TpunbAny = None, nums: bool = False) -> _TpunbAny:  # type: ignore[override]
        """Return the lines sorted, by the words of one column or by the number in them."""

        def key(line: str) -> tuple[_TpunbAny, str]:
            parts = line if field is None else _TpunbLines([line]).fields(field).l
            digits = "".join(part for part in parts if part.isdigit())
            return int(digits or 0) if nums else parts, line

        return _TpunbLines(sorted(self, key=key))

    def grep(self, pattern: _TpunbAny, prune: bool = False, field: _TpunbAny = None) -> _TpunbAny:
        """Return lines that match a pattern or function; with `prune`, the other lines."""

        def found(line: str) -> bool:
            words = line.split()
            where = line if field is None else words[field] if field < len(words) else ""
            if callable(pattern):
                return bool(pattern(where))
            return _tpunb_re.search(pattern, where, _tpunb_re.IGNORECASE) is not None

        return _TpunbLines(line for line in self if found(line) != prune)

    def fields(self, *columns: int) -> _TpunbAny:
        """Return each line's words in these columns, joined; without columns, lists of words."""
        words = [line.split() for line in self]
        if not columns:
            return _TpunbLines(words)
        picked = ([row[at] for at in columns if -len(row) <= at < len(row)] for row in words)
        return _TpunbLines(" ".join(row) for row in picked if row)


def _tpunb_setup_output(command: str) -> _TpunbLines:
    """Run `x = !command`; return the lines that it writes to stdout and stderr."""
    done = _tpunb_setup_once(command, lambda: _tpunb_setup_run(command, "out both"), again=True)
    return _TpunbLines(done[1].splitlines())


def _tpunb_setup_text(body: _TpunbAny) -> str:
    """Return the body of a cell magic, given as a string with a leading newline, or as lines."""
    return body[1:] + "\n" if isinstance(body, str) else "".join(f"{line}\n" for line in body)


def _tpunb_setup_program(line: str, keep: str, check: bool, body: _TpunbAny) -> list[str]:
    """Run `%%bash` or similar; return its output to the streams 'out' and 'err' in `keep`.

    Raises CalledProcessError if it fails, as in a notebook, unless `check` is false.
    """
    text = _tpunb_setup_text(body)
    do = lambda: _tpunb_setup_run(_tpunb_shlex.split(line), keep, text)  # noqa: E731
    done = _tpunb_setup_once([line, text], do, again=bool(keep))
    if check and done[0]:
        raise _tpunb_subprocess.CalledProcessError(
            done[0], _tpunb_shlex.split(line), done[1], done[2]
        )
    return done[1:]  # type: ignore[no-any-return]


def _tpunb_setup_file(path: str, mode: str, body: _TpunbAny) -> None:
    """Write a file, or append to it, as `%%writefile` does."""

    def write() -> None:
        with open(_tpunb_os.path.expanduser(path), mode, encoding="utf-8") as file:
            file.write(_tpunb_setup_text(body))

    _tpunb_setup_once([path, mode, _tpunb_setup_text(body)], write)


@_tpunb_contextlib.contextmanager
def _tpunb_setup_time(magic: str) -> _TpunbIterator[None]:
    """In a train cell, print how long the code of `%time` or `%timeit` takes; it runs once."""
    began = _tpunb_time.perf_counter()
    yield
    if _TPUNB_STATE["training"]:
        print(f"%{magic}: {_tpunb_time.perf_counter() - began:.3g} s", flush=True)


_TPUNB_FOLDERS: list[str] = []


def _tpunb_setup_cd(path: str) -> None:
    """Change the working directory, as `%cd` does; a missing directory is reported and ignored."""
    if _TPUNB_DONE and not _TPUNB_STATE["training"]:
        return
    before = _tpunb_os.getcwd()
    if path == "-" and _TPUNB_FOLDERS:
        path = _TPUNB_FOLDERS[-1]
    try:
        _tpunb_os.chdir(_tpunb_os.path.expanduser(path or "~"))
    except OSError as error:
        print(f"{_tpunb_setup_line()}: {error}", file=_tpunb_sys.stderr, flush=True)
    else:
        _TPUNB_FOLDERS.append(before)


def _tpunb_setup_secrets(*names: str) -> None:
    """End the script at its start if variables that replace secrets are not set."""
    missing = [name for name in names if name not in _tpunb_os.environ]
    if missing:
        raise SystemExit(
            "the notebook contains secrets, which are not in this script. Set before the start: "
            + ", ".join(missing)
        )


def _tpunb_setup_secret(name: str, plain: bool = False) -> str:
    """Return the value of a variable that replaces a secret; quoted for a shell unless `plain`."""
    value = _tpunb_os.environ.get(name)
    if value is None:
        raise SystemExit(
            f"{_tpunb_setup_line()}: the notebook has a secret here, which is not in this script. "
            f"Set it before the start: export {name}=…"
        )
    return value if plain else _tpunb_shlex.quote(value)


def _tpunb_setup_values(text: str, filled_in: _TpunbCallable[[], str]) -> str:
    """Fill in `{expression}` and `$name` in a command; unchanged if one of them has no value."""
    try:
        return filled_in()
    except Exception:  # as in IPython: text that is not a Python expression is for the shell
        return text
