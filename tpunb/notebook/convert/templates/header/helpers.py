"""Functions of scripts, of which `header.py` copies those that a script uses. Never imported.

A function comes before those that it uses; between two of them are two empty lines, and only there.
"""

import ast
import fcntl
import hashlib
import os
import shlex
import signal
import site
import subprocess
import sys


def _tpunb_prepare(**options):
    """Make this process a rank, as tpunb does: one core of a TPU, or of a rehearsal."""
    from tpunb.worker import standalone

    standalone.prepare(**options)


def _tpunb_join_ranks():
    """Let this process drive one core, and call the function of torch_xla's launchers."""
    import torch_xla.distributed.xla_backend
    import torch_xla.distributed.xla_multiprocessing as xmp
    from torch import distributed

    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1 and torch_xla.runtime.device_type() == "TPU":
        distributed.init_process_group("xla", init_method="xla://")
        distributed.destroy_process_group()
    elif ranks > 1 and rank == 0:
        print(f"No TPU was found: each of {ranks} processes trains by itself.", file=sys.stderr)
    torch_xla.launch = xmp.spawn = lambda function, args=(), *_, **__: function(rank, *args)


def _tpunb_setup_output(command):
    """Run `x = !command`; return the lines that it writes."""
    lines = _tpunb_setup_shell(command, keep="out and err")[0].splitlines()
    try:
        from IPython.utils.text import SList

        return SList(lines)
    except ImportError:
        return type("SList", (list,), {"s": property(" ".join), "n": property("\n".join)})(lines)


def _tpunb_setup_install(command):
    """Install packages for this Python, or end the script."""
    pip = command.split()[0] == "pip"
    _tpunb_setup_shell(f"'{sys.executable}' -m {command}" if pip else command, must=True)
    for folder in (*site.getsitepackages(), site.getusersitepackages()):
        site.addsitedir(folder)  # it may be new, or have packages in development mode


def _tpunb_setup_shell(command, *, keep="", must=False, text=""):
    """Run a `!command`, or a program with a text (`%%bash`). Return the streams to `keep`."""

    def run():
        env, pipe, shell = dict(os.environ), subprocess.PIPE, isinstance(command, str)
        if not _TPUNB_STATE["training"]:  # it is for all ranks, and `python` is that of this script
            names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}
            env = {name: env[name] for name in env.keys() - names - {"TORCHELASTIC_RUN_ID"}}
            env["PATH"] = os.path.dirname(sys.executable) + ":" + env.get("PATH", os.defpath)
        options = {"env": env, "stdin": pipe, "encoding": "utf-8", "errors": "replace"}
        options["stdout"] = pipe if "out" in keep else None
        options["stderr"] = subprocess.STDOUT if "and" in keep else pipe if "err" in keep else None
        options["executable"] = env.get("SHELL") if shell else None
        sys.stdout.flush()
        with subprocess.Popen(command, shell=shell, start_new_session=True, **options) as process:
            try:
                out, err = process.communicate(text)
            except BaseException:  # an interrupt ends all that it has started
                os.killpg(process.pid, signal.SIGTERM)  # background commands ignore SIGINT
                raise
        return [process.returncode, out, err]

    status, *streams = _tpunb_setup_once([command, text], run, needed=bool(keep))
    if status and must:
        raise subprocess.CalledProcessError(status, command)
    if not keep:
        if status and not _TPUNB_STATE["training"] and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"line {sys._getframe(1).f_lineno}: ended with status {status}", file=sys.stderr)
        globals()["_exit_code"] = status if status <= 128 else 128 - status  # as IPython has it
    return streams


def _tpunb_setup_file(path, mode, text):
    """Write a file as `%%writefile` does."""

    def write():
        with open(os.path.expanduser(path), mode, encoding="utf-8") as file:
            file.write(text)

    _tpunb_setup_once([path, mode, text], write)


def _tpunb_setup_once(what, do, needed=False):
    """Call `do` in one rank of each host, for all; they meet in the folder of torchrun's logs."""
    training, done = _TPUNB_STATE["training"], _TPUNB_STATE["done"]
    if done and not training and not needed:
        return [0, "", ""]
    sys.path[:0] = [] if "" in sys.path else [""]  # as in a notebook: modules in this folder
    folder = os.path.dirname(os.path.dirname(os.environ.get("TORCHELASTIC_ERROR_FILE", "")))
    if training or done or not folder:
        result = do()
    else:
        _TPUNB_STATE["calls"].append(what)
        call = repr([what, _TPUNB_STATE["calls"].count(what)])
        path = os.path.join(folder, hashlib.sha256(call.encode()).hexdigest())
        with open(path, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # also released when the process ends
            if not file.seek(0, os.SEEK_END):
                file.write(repr(do()))
            file.seek(0)
            result = ast.literal_eval(file.read())
    sys.path_importer_cache.clear()  # there may be new modules
    return result


def _tpunb_setup_cd(path):
    """Change the working directory as `%cd` does; `-` goes back."""
    there = os.environ.get("OLDPWD", ".") if path == "-" else path or "~"
    try:
        os.environ["OLDPWD"] = os.getcwd()
        os.chdir(os.path.expanduser(there))
    except OSError as error:  # as in IPython, the cell continues
        print(error)


def _tpunb_setup_time(magic):
    """In a train cell, print how long the code of `%time` or `%timeit` takes; it runs once."""
    import contextlib
    import time

    @contextlib.contextmanager
    def measure():
        began = time.perf_counter()
        yield
        if _TPUNB_STATE["training"]:
            print(f"%{magic}: {time.perf_counter() - began:.3g} s", flush=True)

    return measure()


def _tpunb_setup_secret(name, plain=False):
    """Return a variable that takes the place of a secret; quoted for a shell unless `plain`."""
    if name not in os.environ:
        raise SystemExit(f"the notebook has a secret that is not in this script: export {name}=…")
    return os.environ[name] if plain else shlex.quote(os.environ[name])


def _tpunb_setup_values(text, filled_in):
    """Fill in `{expression}` and `$name` in a command; unchanged if one of them has no value."""
    try:
        return filled_in()
    except Exception:  # as in IPython: text that is not a Python expression is for the shell
        return text


def _tpunb_launch(fn, args=(), kwargs=None, **options):
    """Call a function on every rank, as tpunb.launch does; all ranks get rank 0's value."""
    before, _TPUNB_STATE["training"] = _tpunb_begin_cell(), True
    value = fn(*args, **(kwargs or {}))
    _TPUNB_STATE["training"] = False
    run = _tpunb_end_cell(before, lambda: {"value": value})
    run.value = run.returns["value"]
    return run


def _tpunb_begin_cell():
    """Begin a train cell, which does not change the random numbers of the cells below."""
    from tpunb.worker import train_cells

    return train_cells.random_states()


def _tpunb_end_cell(before, values):
    """End a train cell: all ranks get rank 0's values, as the notebook does."""
    from tpunb.worker import train_cells

    return train_cells.end_train_cell(before, values)


def _tpunb_end_group():
    """End the process group of a train cell: the next one makes its own."""
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


_TPUNB_STATE = {"training": False, "done": __name__ == "__mp_main__", "calls": []}


def _tpunb_await(what):
    """Await an object, or a function's return value, on this process's event loop."""
    import asyncio

    async def wait():
        return await (what() if callable(what) else what)

    process = os.getpid()  # a loop does not survive a fork
    if process not in _TPUNB_LOOPS:
        _TPUNB_LOOPS[process] = asyncio.new_event_loop()
        asyncio.set_event_loop(_TPUNB_LOOPS[process])
    return _TPUNB_LOOPS[process].run_until_complete(wait())


def _tpunb_in_loop(function, *arguments, **options):
    """Call a function that needs a running event loop, such as `asyncio.create_task`."""

    async def call():
        return function(*arguments, **options)

    return _tpunb_await(call)


_TPUNB_LOOPS = {}


def _tpunb_timeit(*names, setup="", makes=()):
    """Run code of `%timeit` once, after its setup. Its names do not stay, as in IPython."""

    import contextlib

    @contextlib.contextmanager
    def run():
        own, kept = globals(), {*names, *makes}
        before = {name: own[name] for name in kept if name in own}
        exec(setup, own)  # noqa: S102
        try:
            yield [own.get(name) for name in makes]
        finally:
            for name in kept:
                own.pop(name, None)
            own.update(before)

    return run()


def _tpunb_run_notebook(path):
    """Run the code cells of another notebook in this namespace, as `%run` does."""
    import linecache

    for place, source in globals()["_TPUNB_NOTEBOOKS"][path]:
        lines = [f"{line}\n" for line in source.split("\n")]
        linecache.cache[place] = (len(source), None, lines, place)
        exec(compile(source, place, "exec", dont_inherit=True), globals())  # noqa: S102


def _tpunb_run_file(path, *arguments, name="__main__", shared=False):
    """Run a Python file with these arguments and import its names, as `%run` does."""
    own = {"__name__": name or os.path.splitext(os.path.basename(path))[0], "__file__": path}
    names = globals() if shared else own
    argv, folder = sys.argv, os.path.dirname(os.path.abspath(path))
    sys.argv = [path, *arguments]
    sys.path.insert(0, folder)
    try:
        with open(path, "rb") as file:
            exec(compile(file.read(), path, "exec", dont_inherit=True), names)  # noqa: S102
    except SystemExit as error:
        if error.code:
            raise
    finally:
        sys.argv = argv
        sys.path.remove(folder)
    if not shared:
        globals().update((key, value) for key, value in own.items() if key[:2] != "__")


def _tpunb_run_module(name, *arguments):
    """Run a module with these arguments and import its names, as `%run -m` does."""
    import runpy

    argv = sys.argv
    sys.argv = [name, *arguments]
    try:
        own = runpy.run_module(name, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = argv
    globals().update((key, value) for key, value in own.items() if key[:2] != "__")
