"""Lint rules on files: checkpoints of XLA tensors, and files that every rank writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpunb.notebook.lint.checks.sites import (
    constant,
    for_other_hardware,
    owner,
    receiver,
    values_of,
    words,
)
from tpunb.notebook.lint.index import NotebookIndex, Program
from tpunb.notebook.lint.rules import XLA, Hit, rule
from tpunb.notebook.scopes import Site, argument, dotted, last_part, literal


@rule(
    "torch-save-on-xla",
    "warning",
    what="torch.save, or `save_pretrained` of transformers, of a model that is on an XLA device",
    why="the file contains XLA tensors and cannot be loaded without torch_xla; on several cores "
    "every rank writes the same file at once (measured with torch_xla 2.9.0: torch.load gives "
    "tensors of xla:0; aws-neuron-sdk#1315)",
    fix="write `xm.save(model.state_dict(), path)` on every rank, or move it to the CPU first",
    backends=XLA,
)
def _torch_save_on_xla(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.xla or not notebook.device_uses:
        return
    for site in notebook.calls_of("torch.save"):
        saved = site.call.args[:1]
        on_xla = any(_mentions_device(notebook, value, site) for value in saved)
        if on_xla and not for_other_hardware(site):
            yield Hit(site, "`torch.save` gets tensors that are on the XLA device")
    for site in notebook.called.get("save_pretrained", ()):
        model = owner(site)
        if model and _is_moved(notebook, model, site) and not for_other_hardware(site):
            yield Hit(
                site,
                "`save_pretrained` cannot read weights that are on the XLA device: RuntimeError",
                f"write `{model}.cpu()` above it",
            )


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


@rule(
    "file-of-all-ranks",
    "warning",
    what="one file that every core writes, itself or with `!cp`, `!rm` and the like",
    why="the cores write it at the same time: it may contain parts from several cores, or "
    "only those of the last one (follows from the code: the name of the file is the same on all "
    "cores)",
    fix="write it under `if xr.global_ordinal() == 0:`, or put the rank into its name",
    fixes=dict.fromkeys(
        ("torchtpu", "torch"),
        "write it under `if dist.get_rank() == 0:`, or put the rank into its name",
    ),
)
def _file_of_all_ranks(notebook: NotebookIndex) -> Iterator[Hit]:
    on_xla = {(hit.cell.index, hit.line) for hit in _torch_save_on_xla(notebook)}
    for program in notebook.programs:
        for site in notebook.sites.calls if not program.alone else ():
            if site not in program or site.place in on_xla:
                continue
            if (command := _changes_files(notebook, site)) and _on_every_rank(
                notebook, program, site
            ):
                yield Hit(site, f"every core runs `{command}`")
            name = constant(notebook, _written(notebook, site), site)
            is_file = isinstance(name, str) and name and not name.startswith("/dev/")
            if is_file and _on_every_rank(notebook, program, site):
                yield Hit(site, f"every core writes {name!r}")


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


def _written(notebook: NotebookIndex, site: Site) -> ast.expr | None:
    """The name of the file that a call writes."""
    node = site.call
    full = notebook.full(node.func, site)
    if full in _WRITERS:
        return argument(node, "f", _WRITERS[full])
    if full == "open":
        writes = set(str(literal(argument(node, "mode", 1)))) & set("wxa")
        return argument(node, "file", 0) if writes else None
    method = receiver(site) is not None and last_part(node.func) in _WRITING
    return node.args[0] if method and node.args else None


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


@rule(
    "load-to-xla",
    "error",
    what="torch.load with `map_location` an XLA device",
    why="RuntimeError: don't know how to restore data location of torch.storage.UntypedStorage "
    "(tagged with xla:0) (measured with torch 2.9.0 and torch_xla 2.9.0)",
    fix="write `torch.load(path, map_location='cpu')`, and move the model to the device afterwards",
    kernel=True,
    backends=XLA,
)
def _load_to_xla(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of("torch.load"):
        target = argument(site.call, "map_location", 1)
        if target is not None and _only_xla(notebook, target, site):
            yield Hit(site, "torch.load cannot put tensors on an XLA device")


def _only_xla(notebook: NotebookIndex, node: ast.expr, site: Site) -> bool:
    if isinstance(node, ast.IfExp):
        return all(_only_xla(notebook, part, site) for part in (node.body, node.orelse))
    values = values_of(notebook, node, site)
    return bool(values) and all(
        isinstance(v.node, ast.expr) and notebook.is_tpu_device(v.node, v) for v in values
    )
