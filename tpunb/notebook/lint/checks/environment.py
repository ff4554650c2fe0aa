"""Lint rules on environment variables, shell commands, and libraries that take the TPU."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpunb.notebook import removed_apis, torch_installs
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.rules import TPUS, XLA, Hit, rule
from tpunb.notebook.scopes import ParsedCell, Site, packages

SET = re.compile(
    r"(?:^\s*%(?:env|set_env)\s+|\bexport\s+|^\s*!\s*|\s)([A-Z][A-Z0-9_]{3,})\s*=\s*(\S*)"
)
MAGIC = re.compile(r"^\s*%(?:env|set_env)\s+([A-Z][A-Z0-9_]{3,})\s+(\S+)")
EXPORT = re.compile(r"^\s*(?:!\s*)?export\s+([A-Za-z_]\w*)=(\S*)\s*$")
BF16 = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
OFF = {"0", "", "false", "False"}

Place = Site | tuple[ParsedCell, int]
Variable = tuple[Place, str, str | None]
"""An environment variable that is set: place, name and value (None if unknown)."""


def _commands(notebook: NotebookIndex) -> Iterator[tuple[tuple[ParsedCell, int], str]]:
    """Yield place and text of each shell command and magic, except comments."""
    for cell in notebook.cells:
        for line, text in cell.commands():
            if not text.lstrip().startswith("#"):
                yield (cell, line), text


def _variables(notebook: NotebookIndex) -> Iterator[Variable]:
    lost = {(cell.index, line) for cell, line, _, _ in _lost_exports(notebook)}
    for (cell, line), text in _commands(notebook):
        if (cell.index, line) not in lost:  # shell-export reports these
            for match in [*SET.finditer(text), *MAGIC.finditer(text)]:
                yield (cell, line), match[1], match[2].strip("\"'")
    for site in (*notebook.sites.assigns, *notebook.sites.calls):
        for name, value in notebook.sites.variables_set(site):
            if (known := _text(name)) is not None:
                yield site, known, _text(value)


def _text(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int):
        return str(node.value)
    return None


@rule(
    "shell-export",
    "warning",
    what="`!export NAME=value`",
    why="it sets the variable in a shell that ends with the line: neither the notebook nor a run "
    "sees it (IPython runs every `!` line in a new shell)",
    fix="write `%env NAME=value`",
    kernel=True,
)
def _shell_export(notebook: NotebookIndex) -> Iterator[Hit]:
    for cell, line, name, value in _lost_exports(notebook):
        bad = removed_apis.lookup_variable(name) is not None
        fix = "remove it" if bad else f"write `%env {name}={value}`"
        yield Hit((cell, line), f"{name} is set in a shell that ends at once", fix)


def _lost_exports(notebook: NotebookIndex) -> Iterator[tuple[ParsedCell, int, str, str]]:
    """Yield exported variables that nothing in the same shell can use: place, name, value."""
    for cell in notebook.cells:
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
                yield cell, line, match[1], match[2]


@rule(
    "bf16-variable",
    "warning",
    what="XLA_USE_BF16 or XLA_DOWNCAST_BF16",
    why="every float32 tensor becomes bfloat16 while its `dtype` stays float32: 1 * 1.001 gives "
    "1.0, sums of losses stop growing, and `torch.finfo(torch.float32).min` is -inf, so results "
    "become NaN (measured with torch_xla 2.9.0; pytorch/xla#2425)",
    fix="remove it, and write `model.to(torch.bfloat16)` or "
    "`with torch.autocast('xla', dtype=torch.bfloat16):`",
    kernel=True,
    backends=XLA,
)
def _bf16_variable(notebook: NotebookIndex) -> Iterator[Hit]:
    for at, name, value in _variables(notebook):
        if name in BF16 and value not in OFF:
            yield Hit(at, f"{name} silently makes all float32 tensors bfloat16")


@rule(
    "retired-variable",
    "hint",
    what="an environment variable of the XRT runtime, or one that has no effect",
    why="torch_xla 2.9 does not read it (torch_xla 2.9.0 has no XRT runtime)",
    fix="remove it",
    kernel=True,
    backends=XLA,
)
def _retired_variable(notebook: NotebookIndex) -> Iterator[Hit]:
    for at, name, _ in _variables(notebook):
        row = removed_apis.lookup_variable(name)
        if row is not None and name not in BF16:
            deprecated = row.state == "deprecated"
            state = "is deprecated" if deprecated else "has no effect in torch_xla 2.9"
            yield Hit(at, f"{name} {state}", row.advice)
    for site in notebook.sites.subscripts:
        node = site.node
        assert isinstance(node, ast.Subscript)
        if not isinstance(node.ctx, ast.Load) or notebook.full(node.value, site) != "os.environ":
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
    "retired-command",
    "warning",
    what="an install or launch command of older torch_xla",
    why="it fails, or installs a torch_xla that does not work with today's torch, Python or TPU "
    "(the packages of old set-up cells, compared with torch_xla 2.9.0)",
    fix="use the torch and torch_xla that the machine has, or install a matching pair",
    kernel=True,
    backends=XLA,
)
def _retired_command(notebook: NotebookIndex) -> Iterator[Hit]:
    for at, text in _commands(notebook):
        row = next((row for row in removed_apis.COMMANDS if row.old in text), None)
        if row is not None:
            yield Hit(at, f"`{row.old}` belongs to an older torch_xla", row.advice)


@rule(
    "half-a-pair",
    "warning",
    what="an install of a torch or torch_xla that does not match the other",
    why=f"{torch_installs.WHY} "
    "(pytorch/xla's README: each release is built for the torch with the same number)",
    fix="remove it on Colab and Kaggle, which have a pair; elsewhere install both together",
    kernel=True,
    backends=XLA,
)
def _half_a_pair(notebook: NotebookIndex) -> Iterator[Hit]:
    commands = [
        (at, text)
        for at, text in _commands(notebook)
        if not any(row.old in text for row in removed_apis.COMMANDS)
    ]
    for (index, line), what in torch_installs.half_pairs(
        ((index, line), text) for index, ((_, line), text) in enumerate(commands)
    ).items():
        (cell, _), text = commands[index]
        pair = torch_installs.is_pair(text)
        missing = ", and another line another release" if pair else " without its counterpart"
        yield Hit((cell, line), f"this installs {what}{missing}")


@rule(
    "tensorflow-import",
    "warning",
    what="tensorflow imported in addition to torch_xla",
    why="a tensorflow built for TPUs takes the chips, or aborts the process when torch_xla loads "
    "its own libtpu; importing it also starts threads, so ranks cannot be forked after it "
    "(torch_xla 2.9.0 __init__.py warns of it; pytorch/xla#6565, tensorflow#87383)",
    fix="keep it out of the run (tag the cell tpu-skip), or install tensorflow-cpu instead",
    backends=XLA,
)
def _tensorflow_import(notebook: NotebookIndex) -> Iterator[Hit]:
    light = any("tensorflow-cpu" in text for _, text in _commands(notebook))
    for site in notebook.sites.imports if notebook.runs_on_tpu else ():
        if "tensorflow" in packages(site.node) and site.cell.part != "kernel":
            message = "tensorflow is imported in addition to torch_xla"
            yield Hit(site, message, severity="hint" if light else None)
            return


@rule(
    "tracker-above",
    "warning",
    what="a run of wandb, MLflow or another experiment tracker begun above the train cell",
    why="each training begins one more, and one for each rank if every rank runs the cell itself "
    "(docs/watching.md)",
    fix="begin its cell with `# tpu: skip` and pass the metrics on with tpunb.on_log, or begin it "
    "in the train cell on rank 0",
)
def _tracker_above(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of(*TRACKERS) if notebook.has_train else ():
        if site.cell.part == "prelude" and site.frame.function is None:
            name = notebook.full(site.call.func, site)
            yield Hit(site, f"{name} begins a run of its own for each training")


TRACKERS = (
    *("wandb.init", "mlflow.start_run", "trackio.init", "swanlab.init", "neptune.init_run"),
    *("comet_ml.start", "comet_ml.Experiment", "clearml.Task.init", "aim.Run", "dvclive.Live"),
)

TAKES_TPU = (
    *("jax.devices", "jax.local_devices", "jax.device_count", "jax.local_device_count"),
    *("jax.default_backend", "jax.numpy.array", "jax.numpy.zeros", "jax.numpy.ones"),
    "tensorflow.tpu.experimental.initialize_tpu_system",
    "tensorflow.distribute.cluster_resolver.TPUClusterResolver",
    "tensorflow.distribute.TPUStrategy",
    "tensorflow.distribute.experimental.TPUStrategy",
)


@rule(
    "tpu-taken",
    "warning",
    what="jax or tensorflow starting the TPU in a notebook that trains with torch_xla",
    why="only one process can use a chip: while the kernel holds it, every run fails with 'Device "
    "or resource busy' (reported as 'open(/dev/vfio/0): Device or resource busy'; not measured on "
    "a TPU)",
    fix="set JAX_PLATFORMS=cpu before jax is imported, or do that part in another notebook",
    kernel=True,
    backends=TPUS,
)
def _tpu_taken(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.xla and not notebook.has_train:
        return
    if any(name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME") for _, name, _ in _variables(notebook)):
        return
    for site in sorted(notebook.calls_of(*TAKES_TPU), key=lambda site: site.place)[:1]:
        package = notebook.full(site.call.func, site).partition(".")[0]
        yield Hit(site, f"this makes {package} take the TPU, so no run can use it")
