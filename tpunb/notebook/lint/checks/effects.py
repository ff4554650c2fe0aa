"""Lint rules on what cells leave behind: files, variables of the environment, tracked runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpunb.notebook.lint.checks.sites import constant, for_other_hardware, owner, receiver, words
from tpunb.notebook.lint.index import NotebookIndex, Program
from tpunb.notebook.lint.rule_table import XLA, Hit, Rule, without_xla
from tpunb.notebook.scopes import ParsedCell, Site, argument, dotted, last_part, literal


@Rule(
    "torch-save-on-xla",
    "warning",
    what="torch.save of a model that is on an XLA device",
    why="the file contains XLA tensors and cannot be loaded without torch_xla; on several cores "
    "every rank writes the same file at once (measured with torch_xla 2.9.0: torch.load gives "
    "tensors of xla:0; aws-neuron-sdk#1315)",
    fix="write `xm.save(model.state_dict(), path)`, or move it to the CPU first",
    backends=XLA,
)
def _torch_save_on_xla(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.xla or not notebook.uses_device:
        return
    for site in notebook.calls_of("torch.save"):
        saved = site.call.args[:1]
        on_xla = any(_mentions_device(notebook, value, site) for value in saved)
        if on_xla and not for_other_hardware(site):
            yield Hit(site, "`torch.save` gets tensors that are on the XLA device")


def _mentions_device(notebook: NotebookIndex, value: ast.expr, site: Site) -> bool:
    """Whether a value contains the state of a model that is on an XLA device."""
    calls = [part for part in ast.walk(value) if isinstance(part, ast.Call)]
    inner = {last_part(part.func) for part in calls}
    moved = {"cpu", "to", "_maybe_convert_to_cpu", "tree_map"}
    if inner & moved or isinstance(value, ast.DictComp):
        return False
    if isinstance(value, ast.Name):
        values = notebook.values(value.id, site.frame)
        return bool(values) and all(
            isinstance(v.node, ast.Call | ast.Dict) and _mentions_device(notebook, v.node, v)
            for v in values
        )
    models = (
        dotted(part.func.value)
        for part in calls
        if isinstance(part.func, ast.Attribute) and part.func.attr == "state_dict"
    )
    return any(model and _is_moved(notebook, model, site) for model in models)


def _is_moved(notebook: NotebookIndex, model: str, site: Site) -> bool:
    """Whether the last move of a model before a site is to an XLA device."""
    made = [value.node for value in notebook.values(model, site.frame)]
    moves = [
        other
        for name in ("to", "cpu")
        for other in notebook.called.get(name, ())
        if (owner(other) == model or any(node is other.node for node in made))
        and other.frame.function is site.frame.function
        and other.place < site.place
    ]
    if not moves:
        return False
    final = max(moves, key=lambda site: site.place)
    target = argument(final.call, "device", 0)
    return target is not None and notebook.is_tpu_device(target, final)


@Rule(
    "file-of-all-ranks",
    "warning",
    what="one file that every core writes, itself or with `!cp`, `!rm` and the like",
    why="the cores write it at the same time: it may contain parts from several cores, or "
    "only those of the last one (follows from the code: the name of the file is the same on all "
    "cores)",
    fix="write it under `if xr.global_ordinal() == 0:`, or put the rank into its name",
    several=True,
    fixes=without_xla("write it under `if dist.get_rank() == 0:`, or put the rank into its name"),
)
def _file_of_all_ranks(notebook: NotebookIndex) -> Iterator[Hit]:
    on_xla = {(hit.cell.index, hit.line) for hit in _torch_save_on_xla(notebook)}
    for program in notebook.programs:
        for site in notebook.sites.calls:
            if site not in program or site.place in on_xla:
                continue
            name, command = _written(notebook, site), _changes_files(notebook, site)
            if (name or command) and _on_every_rank(notebook, program, site):
                yield Hit(
                    site, f"every core writes {name!r}" if name else f"every core runs `{command}`"
                )


_COMMANDS = re.compile(
    r"(?:^|[;&|(\n])\s*(?:cp|mv|rm|rmdir|mkdir|ln|touch|tar|zip|unzip|gzip|gunzip|rsync|wget|tee"
    r"|git\s+clone|gsutil|gcloud|aws|hf|kaggle)\b(?!\s+-p\b)|(?<![>&\d-])>>?(?!\s*(?:&|/dev/))"
)
"""Commands of a shell that change files, and redirections to a file."""


def _changes_files(notebook: NotebookIndex, site: Site) -> str:
    """A shell command, if it changes the same files on each rank."""
    function, parts = dotted(site.call.func), site.call.args
    if function != "_tpunb_setup_shell":
        return ""
    given = parts[0]
    if body := argument(site.call, "text"):
        if not isinstance(given, ast.List) or literal(given.elts[0]) not in ("sh", "bash"):
            return ""
        given = body
    nodes = list(ast.walk(given))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    text = next((text.strip() for text in texts if isinstance(text, str) and text.strip()), "")
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    filled_in = [node for node in nodes if isinstance(node, ast.Name) and node not in called]
    same = all(constant(notebook, name, site) is not ... for name in filled_in)
    if "RANK" in text or not same or not _COMMANDS.search(text):
        return ""
    return text.partition("\n")[0]


_WRITERS = {
    "torch.save": 1,
    **dict.fromkeys(("numpy.save", "numpy.savez", "numpy.savez_compressed", "numpy.savetxt"), 0),
    "joblib.dump": 1,
    "matplotlib.pyplot.savefig": 0,
}
"""Functions that write a file, and the position of its name."""
_WRITING = (
    *("to_csv", "to_parquet", "to_json", "to_pickle", "to_feather", "to_excel", "savefig"),
    "save_pretrained",
)
"""Methods that write the file that is their first argument."""


def _written(notebook: NotebookIndex, site: Site) -> str:
    """The name of the file that a call writes, if it is a constant."""
    node, given = site.call, None
    full = notebook.full(node.func, site)
    if full in _WRITERS:
        given = argument(node, "f", _WRITERS[full])
    elif full == "open" and set(str(literal(argument(node, "mode", 1)))) & set("wxa"):
        given = argument(node, "file", 0)
    elif receiver(site) is not None and last_part(node.func) in _WRITING and node.args:
        given = node.args[0]
    name = constant(notebook, given, site)
    return name if isinstance(name, str) and not name.startswith("/dev/") else ""


_ONE = ("main", "master", "first", "rank", "zero", "ordinal", "process", "once")
"""Parts of the names of context managers that may let only one rank in."""


def _on_every_rank(notebook: NotebookIndex, program: Program, site: Site, depth: int = 0) -> bool:
    """Whether every rank of a program reaches a site, as far as conditions are concerned."""
    for test, _ in site.conditions():
        now_and_then = any(isinstance(part, ast.Mod) for part in ast.walk(test))
        if not now_and_then or notebook.depends_on_rank(test, site):
            return False
    for frame in site.frame.outward():
        node = frame.node
        if isinstance(node, ast.Match | ast.ExceptHandler):
            return False
        if isinstance(node, ast.With | ast.AsyncWith):
            names = {word for item in node.items for word in words(item.context_expr)}
            if any(part in name for part in _ONE for name in names):
                return False
    function = site.frame.function
    if _may_have_left(function.node if function else site.cell.tree, site):
        return False
    if function is None:
        return True
    if depth > 4 or isinstance(function.node, ast.Lambda) or function.node.decorator_list:
        return False
    sites = notebook.sites
    callers = [s for s in sites.calls if s in program and function in sites.called(s)]
    if not callers and program.cell is None:
        return True  # the function that is launched
    return any(_on_every_rank(notebook, program, caller, depth + 1) for caller in callers)


def _may_have_left(body: ast.AST, site: Site) -> bool:
    """Whether a rank may have left the function, or this pass of a loop, above a site."""
    leaves = (ast.Return, ast.Raise, ast.Continue, ast.Break)
    return any(isinstance(node, leaves) and node.lineno < site.line for node in ast.walk(body))


_BF16 = re.compile(r"\b(XLA_(?:USE|DOWNCAST)_BF16)\s*[= ]\s*[\"']?(\w+)")
"""In a magic or a shell command, name and value."""
_OFF = ("0", "", "false", "False")


@Rule(
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
    found = list[tuple[Site | tuple[ParsedCell, int], object, object]]()
    for cell in notebook.cells:
        for line, text in cell.commands():
            if not text.lstrip().startswith("#"):
                found += [((cell, line), *match) for match in _BF16.findall(text)]
    for site in (*notebook.sites.assigns, *notebook.sites.calls):
        for name, value in notebook.sites.variables_set(site):
            if literal(name) in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
                found.append((site, literal(name), literal(value)))
    for at, variable, given in found:
        if str(given) not in _OFF:
            yield Hit(at, f"{variable} silently makes all float32 tensors bfloat16")


@Rule(
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
