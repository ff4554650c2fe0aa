"""Lint rules on environment variables and shell commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from tpunb.notebook import removed_apis, torch_installs
from tpunb.notebook.lint.findings import Severity
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.names import argument, call, literal
from tpunb.notebook.lint.rules import Hit, rule
from tpunb.notebook.lint.walk import ParsedCell, Site

SET = re.compile(
    r"(?:^\s*%(?:env|set_env)\s+|\bexport\s+|^\s*!\s*|\s)([A-Z][A-Z0-9_]{3,})\s*=\s*(\S*)"
)
MAGIC = re.compile(r"^\s*%(?:env|set_env)\s+([A-Z][A-Z0-9_]{3,})\s+(\S+)")
EXPORT = re.compile(r"^\s*(?:!\s*)?export\s+([A-Za-z_]\w*)=(\S*)\s*$")
OFF = {"0", "", "false", "False"}

Place = Site | tuple[ParsedCell, int]


Variable = tuple[Place, str, str | None]
_found: WeakKeyDictionary[NotebookIndex, list[Variable]] = WeakKeyDictionary()


def _variables(notebook: NotebookIndex) -> list[Variable]:
    """Each environment variable that is set: place, name and value (None if unknown)."""
    if notebook not in _found:
        _found[notebook] = list(_settings(notebook))
    return _found[notebook]


def _settings(notebook: NotebookIndex) -> Iterator[Variable]:
    for cell in notebook.cells:
        lost = {line for line, _, _ in _lost_exports(cell)}
        for line, text in cell.commands():
            # shell-export reports an export that nothing uses.
            if text.lstrip().startswith("#") or line in lost:
                continue
            for match in [*SET.finditer(text), *MAGIC.finditer(text)]:
                yield (cell, line), match[1], match[2].strip("\"'")
    for site in notebook.sites.assigns:
        node = site.node
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environ(notebook, target.value, site):
                name = _text(target.slice)
                if name is not None:
                    yield site, name, _text(node.value)
    for site in notebook.calls_of("os.environ.setdefault", "os.putenv"):
        name = _text(call(site).args[0]) if len(call(site).args) > 1 else None
        if name is not None:
            yield site, name, _text(call(site).args[1])
    for site in notebook.calls_of("os.environ.update"):
        for word in call(site).keywords:
            if word.arg:
                yield site, word.arg, _text(word.value)
        for given in call(site).args:
            if isinstance(given, ast.Dict):
                for key, value in zip(given.keys, given.values, strict=True):
                    name = _text(key)
                    if name is not None:
                        yield site, name, _text(value)


def _is_environ(notebook: NotebookIndex, node: ast.expr, site: Site) -> bool:
    return notebook.full(node, site) == "os.environ"


def _text(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int):
        return str(node.value)
    return None


@rule(
    "shell-export",
    "warning",
    what="`!export NAME=value`",
    fact="it sets the variable in a shell that ends with the line: neither the notebook nor a run "
    "sees it",
    source="IPython runs every `!` line in a new shell",
    fix="write `%env NAME=value`",
    kernel=True,
)
def _shell_export(notebook: NotebookIndex) -> Iterator[Hit]:
    for cell in notebook.cells:
        for line, name, value in _lost_exports(cell):
            bad = removed_apis.lookup_variable(name) is not None
            fix = "remove it" if bad else f"write `%env {name}={value}`"
            yield Hit((cell, line), f"{name} is set in a shell that ends at once", fix)


def _lost_exports(cell: ParsedCell) -> Iterator[tuple[int, str, str]]:
    """Yield exported variables that nothing in the same shell can use: line, name, value."""
    commands = list(cell.commands())
    in_cell = bool(commands) and commands[0][1].startswith("%%")
    for at, (line, text) in enumerate(commands):
        match = EXPORT.match(text)
        rest = commands[at + 1 :] if in_cell else []
        used = any(
            other.strip() and not other.startswith("#") and not EXPORT.match(other)
            for _, other in rest
        )
        if match is not None and not used:
            yield line, match[1], match[2]


@rule(
    "bf16-variable",
    "warning",
    what="XLA_USE_BF16 or XLA_DOWNCAST_BF16",
    fact="every float32 tensor becomes bfloat16 while its `dtype` stays float32: 1 * 1.001 gives "
    "1.0, sums of losses stop growing, and `torch.finfo(torch.float32).min` is -inf, hence NaN",
    source="measured with torch_xla 2.9.0; pytorch/xla#2425",
    fix="remove it, and write `model.to(torch.bfloat16)` or "
    "`with torch.autocast('xla', dtype=torch.bfloat16):`",
    kernel=True,
)
def _bf16_variable(notebook: NotebookIndex) -> Iterator[Hit]:
    for at, name, value in _variables(notebook):
        if name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16") and value not in OFF:
            yield Hit(at, f"{name} silently makes all float32 tensors bfloat16")


@rule(
    "retired-variable",
    "hint",
    what="an environment variable of the XRT runtime, or one that has no effect",
    fact="torch_xla 2.9 does not read it",
    source="torch_xla 2.9.0 has no XRT runtime",
    fix="remove it",
    kernel=True,
)
def _retired_variable(notebook: NotebookIndex) -> Iterator[Hit]:
    for at, name, _ in _variables(notebook):
        row = removed_apis.lookup_variable(name)
        if row is None or name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
            continue
        if row.state == "deprecated":
            yield Hit(at, f"{name} is deprecated", row.advice)
        else:
            yield Hit(at, f"{name} has no effect in torch_xla 2.9", row.advice)
    for site in notebook.sites.subscripts:
        node = site.node
        assert isinstance(node, ast.Subscript)
        if not isinstance(node.ctx, ast.Load) or not _is_environ(notebook, node.value, site):
            continue
        row = removed_apis.lookup_variable(_text(node.slice) or "")
        if row is not None and row.old in ("COLAB_TPU_ADDR", "XRT_TPU_CONFIG"):
            guarded = any(True for _ in site.conditions()) or not site.simple()
            yield Hit(
                site,
                f"{row.old} is not set on current TPU machines: KeyError",
                row.advice,
                severity="warning" if guarded else "error",
            )


@rule(
    "node-address",
    "warning",
    what="the address of a TPU node: `grpc://…` with the name of a TPU, `tpu_worker;0;…:8470`",
    fact="TPU nodes, which were reached over the network, no longer exist: nothing answers",
    source="Google Cloud's TPU Node architecture, discontinued; torch_xla 2.9.0 reads no address",
    fix="remove it: PJRT finds this machine's TPU by itself",
    kernel=True,
)
def _node_address(notebook: NotebookIndex) -> Iterator[Hit]:
    others = (*_retired_variable(notebook), *_shell_export(notebook))
    reported = {(hit.cell.index, hit.line) for hit in others}
    for cell in notebook.cells:
        places = {
            line
            for line, text in cell.commands()
            if not text.lstrip().startswith("#") and removed_apis.is_node_address(text, text)
        }
        if "grpc://" in (whole := "\n".join(cell.lines)) or "tpu_worker;" in whole:
            places |= set(_addresses(cell.tree))
        for line in sorted(places):
            if (cell.index, line) not in reported:
                yield Hit((cell, line), "this is the address of a TPU node: these no longer exist")


def _addresses(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of strings that are addresses, except docstrings."""
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.stmt) or getattr(statement, "body", None):
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        around = ast.unparse(statement)
        for node in ast.walk(statement):
            text = literal(node)
            if isinstance(text, str) and removed_apis.is_node_address(text, around):
                yield node.lineno  # type: ignore[attr-defined]


@rule(
    "retired-command",
    "warning",
    what="an install or launch command of older torch_xla",
    fact="it fails, or installs a torch_xla that does not work with today's torch, Python or TPU",
    source="the packages of old set-up cells, compared with torch_xla 2.9.0",
    fix="use the torch and torch_xla that the machine has, or install a matching pair",
    kernel=True,
)
def _retired_command(notebook: NotebookIndex) -> Iterator[Hit]:
    for cell in notebook.cells:
        for line, text in cell.commands():
            if text.lstrip().startswith("#"):
                continue
            for row in removed_apis.COMMANDS:
                if row.old in text:
                    yield Hit(
                        (cell, line), f"`{row.old}` belongs to an older torch_xla", row.advice
                    )
                    break


@rule(
    "half-a-pair",
    "warning",
    what="an install of a torch or torch_xla that does not match the other",
    fact=torch_installs.WHY,
    source="pytorch/xla's README: each release is built for the torch with the same number",
    fix="remove it on Colab and Kaggle, which have a pair; elsewhere install both together",
    kernel=True,
)
def _half_a_pair(notebook: NotebookIndex) -> Iterator[Hit]:
    commands = [
        ((cell, line), text)
        for cell in notebook.cells
        for line, text in cell.commands()
        if not text.lstrip().startswith("#")
        and not any(row.old in text for row in removed_apis.COMMANDS)
    ]
    for (index, line), what in torch_installs.half_pairs(
        ((at, line), text) for at, ((_, line), text) in enumerate(commands)
    ).items():
        pair = torch_installs.is_pair(commands[index][1])
        missing = ", and another line another release" if pair else " without its counterpart"
        yield Hit((commands[index][0][0], line), f"this installs {what}{missing}")


@rule(
    "tensorflow-import",
    "warning",
    what="tensorflow imported in addition to torch_xla",
    fact="a tensorflow built for TPUs takes the chips, or aborts the process when torch_xla loads "
    "its own libtpu; importing it also starts threads, so ranks cannot be forked after it",
    source="torch_xla 2.9.0 __init__.py warns of it; pytorch/xla#6565, tensorflow#87383",
    fix="keep it out of the run (tag the cell tpu-skip), or install tensorflow-cpu instead",
)
def _tensorflow_import(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.runs_on_tpu:
        return
    light = any("tensorflow-cpu" in text for cell in notebook.cells for _, text in cell.commands())
    for site in notebook.sites.imports:
        if site.cell.part == "kernel":
            continue
        node = site.node
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.level:
            continue
        if any(module.partition(".")[0] == "tensorflow" for module in modules):
            severity: Severity | None = "hint" if light else None
            yield Hit(site, "tensorflow is imported in addition to torch_xla", severity=severity)
            return


JAX = {
    *("jax.devices", "jax.local_devices", "jax.device_count", "jax.local_device_count"),
    *("jax.default_backend", "jax.numpy.array", "jax.numpy.zeros", "jax.numpy.ones"),
}
TF = {
    "tensorflow.tpu.experimental.initialize_tpu_system",
    "tensorflow.distribute.cluster_resolver.TPUClusterResolver",
    "tensorflow.distribute.TPUStrategy",
    "tensorflow.distribute.experimental.TPUStrategy",
}


@rule(
    "tpu-taken",
    "warning",
    what="jax or tensorflow starting the TPU in a notebook that trains with torch_xla",
    fact="only one process can use a chip: while the kernel holds it, every run fails with "
    "'Device or resource busy'",
    source="reported as 'open(/dev/vfio/0): Device or resource busy'; not measured on a TPU",
    fix="set JAX_PLATFORMS=cpu before jax is imported, or do that part in another notebook",
    kernel=True,
)
def _tpu_taken(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.xla and not notebook.has_train:
        return
    if any(name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME") for _, name, _ in _variables(notebook)):
        return
    for site in notebook.calls_of(*sorted(JAX | TF)):
        package = notebook.full(call(site).func, site).partition(".")[0]
        yield Hit(site, f"this makes {package} take the TPU, so no run can use it")
        return


@rule(
    "late-variable",
    "warning",
    what="PJRT_DEVICE set after the XLA device was used",
    fact="the runtime reads it once, when the first device is used",
    source="torch_xla 2.9.0 runtime.py: set_device_type raises RuntimeError for the same",
    fix="set it in the first cell, before torch_xla is imported",
)
def _late_variable(notebook: NotebookIndex) -> Iterator[Hit]:
    first = min(
        (
            (site.cell.index, site.line)
            for site in notebook.device_uses
            if site.frame.function is None and site.cell.part != "train"
        ),
        default=None,
    )
    if first is None:
        return
    for at, name, _ in _variables(notebook):
        if name != "PJRT_DEVICE":
            continue
        hit = Hit(at, "PJRT_DEVICE has no effect: an XLA device was used before it is set")
        if isinstance(at, Site) and at.frame.function is not None:
            continue
        if hit.cell.part != "train" and (hit.cell.index, hit.line) > first:
            yield hit


@rule(
    "workers-spawned",
    "hint",
    what="DataLoader workers that are spawned, not forked",
    fact="each worker of each rank gets a pickled copy of the whole data set: minutes to start, "
    "and as many copies in memory as there are workers, times the number of cores",
    source="torch.utils.data: the start method decides how the workers get the data set",
    fix="keep the start method fork, or read the data from files in `__getitem__`",
)
def _workers_spawned(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.data_loaders:
        context = argument(call(site), "multiprocessing_context")
        workers = argument(call(site), "num_workers", 5)
        if not isinstance(context, ast.Constant) or workers is None:
            continue
        if context.value in ("spawn", "forkserver") and literal(workers) != 0:
            yield Hit(site, f"the workers are started with {context.value!r}")
