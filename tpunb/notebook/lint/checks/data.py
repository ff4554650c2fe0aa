"""Lint rules on data loaders: the last batch, sharding over the ranks, workers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpunb.notebook.lint.checks.sites import constant, has_spread, values_of, words
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.rules import TPUS, Hit, rule
from tpunb.notebook.scopes import Site, argument, dotted, last_part, literal

EVALUATION = re.compile(r"val|test|eval|dev|infer|pred|submi|holdout")
SAMPLERS = (
    "torch.utils.data.distributed.DistributedSampler",
    "torch.utils.data.DistributedSampler",
)


def _given(node: ast.expr | None) -> bool:
    """Whether an argument is present and not None or False."""
    return node is not None and literal(node) not in (None, False)


def _loads(notebook: NotebookIndex, site: Site) -> list[Site]:
    """The sites that read the names to which the result of a call is assigned."""
    names = notebook.names_of(site.call)
    return [load for name in names for load in notebook.sites.loads(name)]


def _training(notebook: NotebookIndex, site: Site) -> bool:
    """Whether a DataLoader is for training, judged by names."""
    node = site.call
    if not _is_used(notebook, site):
        return False
    dataset, shuffle = argument(node, "dataset", 0), argument(node, "shuffle", 2)
    names = words(dataset) if dataset is not None else set()
    names |= {name.lower() for name in notebook.names_of(node)}
    function = site.frame.function
    if function is not None and literal(shuffle) is not False:
        names.add(function.name.lower())
    if any("train" in name for name in names):
        return not any(EVALUATION.search(name) for name in names if "train" not in name)
    if any(EVALUATION.search(name) for name in names):
        return False
    return _given(shuffle) or _given(argument(node, "sampler", 3))


def _is_used(notebook: NotebookIndex, site: Site) -> bool:
    """Whether a loop or a function uses a loader, not just `next(iter(loader))`."""
    names = notebook.names_of(site.call)
    if not names or any("." in name for name in names):
        return True
    for load in _loads(notebook, site):
        takers = notebook.calls_taking(load)
        if not takers or last_part(takers[0].func) not in ("iter", "len", "print"):
            return True
        if any(getattr(loop.node, "iter", None) is takers[0] for loop in notebook.sites.loops):
            return True
    return False


def _sharded(notebook: NotebookIndex, site: Site) -> bool:
    """Whether a loader is passed to `tpunb.training.shard`, which makes all its batches full."""
    takers = (t for at in (site, *_loads(notebook, site)) for t in notebook.calls_taking(at))
    return any(last_part(taker.func) == "shard" for taker in takers)


def _drops(notebook: NotebookIndex, site: Site) -> bool:
    """Whether the last, smaller batch is or may be dropped, or there is none."""
    node = site.call
    value = argument(node, "drop_last", 8)
    if value is not None:
        return literal(value) is not False
    if has_spread(node) or any(isinstance(part, ast.Starred) for part in node.args):
        return True
    size = argument(node, "batch_size", 1)
    if _given(argument(node, "batch_sampler", 4)) or size is None or literal(size) in (1, None):
        return True
    samplers = (v.node for v in values_of(notebook, argument(node, "sampler", 3), site))
    return any(
        isinstance(sampler, ast.Call)
        and last_part(sampler.func) in ("RandomSampler", "WeightedRandomSampler")
        and (_given(argument(sampler, "num_samples")) or len(sampler.args) > 1)
        for sampler in samplers
    )


@rule(
    "last-batch",
    "warning",
    what="a training DataLoader that keeps the last, smaller batch",
    why="its shape needs a second program, which takes as long to compile as the first; if ranks "
    "have batches of different sizes, their collectives do not match (pytorch/xla#1368 on "
    "recompilation, #2020 on a hang at the end of an epoch)",
    fix="write drop_last=True",
    backends=TPUS,
)
def _last_batch(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.on_device or not notebook.trains:
        return
    if notebook.imports("accelerate") and "prepare" in notebook.called:
        return  # accelerate fills the last batch
    for site in notebook.data_loaders:
        if site.cell.part == "kernel" or _drops(notebook, site) or _sharded(notebook, site):
            continue
        if _training(notebook, site):
            yield Hit(site, "the last batch of an epoch has a different shape from the others")


@rule(
    "no-sampler",
    "warning",
    what="a training DataLoader on several cores without a DistributedSampler",
    why="every core processes all of the data, so an epoch takes as long as on one core "
    "(torch.utils.data: a DataLoader does not know about ranks)",
    fix="write `sampler=DistributedSampler(dataset, num_replicas=xr.world_size(), "
    "rank=xr.global_ordinal())`, and no `shuffle`",
    fixes=dict.fromkeys(
        ("torchtpu", "torch"), "write `sampler=DistributedSampler(dataset)`, and no `shuffle`"
    ),
)
def _no_sampler(notebook: NotebookIndex) -> Iterator[Hit]:
    if not (notebook.multi and notebook.native) or notebook.managed or not notebook.loops:
        return
    if "DistributedSampler" in notebook.called or _divided(notebook):
        return
    for site in notebook.data_loaders:
        node = site.call
        own = _given(argument(node, "sampler", 3)) or _given(argument(node, "batch_sampler", 4))
        if own or has_spread(node) or _takes_rank(notebook, site):
            continue
        if _training(notebook, site) and _launched(notebook, site):
            yield Hit(site, "every core loads all of the data")


def _takes_rank(notebook: NotebookIndex, site: Site) -> bool:
    """Whether the data set of a loader is constructed for a rank: `Rows(index)`."""
    return any(
        notebook.depends_on_rank(part, value)
        for value in values_of(notebook, argument(site.call, "dataset", 0), site)
        if isinstance(value.node, ast.Call)
        for part in value.node.args
    )


def _divided(notebook: NotebookIndex) -> bool:
    """Whether the notebook divides the data among the ranks itself."""
    if notebook.called.keys() & {"shard", "split_between_processes", "split_dataset_by_node"}:
        return True
    names = {"num_replicas", "num_shards", "rank", "world_size"}
    if any(word.arg in names for site in notebook.sites.calls for word in site.call.keywords):
        return True
    return any(
        isinstance(site.node, ast.Subscript) and notebook.depends_on_rank(site.node.slice, site)
        for site in notebook.sites.subscripts
    )


def _launched(notebook: NotebookIndex, site: Site) -> bool:
    """Whether ranks train with a loader: they construct it or read its name."""
    return any(notebook.in_rank(at) for at in (site, *_loads(notebook, site)))


@rule(
    "sampler-and-shuffle",
    "error",
    what="a DataLoader with `shuffle=True` and a sampler",
    why="ValueError: sampler option is mutually exclusive with shuffle (torch 2.9.0 "
    "utils/data/dataloader.py)",
    fix="let the sampler shuffle: `DistributedSampler(..., shuffle=True)`",
)
def _sampler_and_shuffle(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.data_loaders:
        node = site.call
        sampler = argument(node, "sampler", 3)
        values = values_of(notebook, sampler, site)
        shuffles = literal(argument(node, "shuffle", 2)) is True
        if shuffles and values and all(isinstance(value.node, ast.Call) for value in values):
            message = "shuffle=True and a sampler are mutually exclusive"
            yield Hit(site, message, certain=isinstance(sampler, ast.Call))


@rule(
    "set-epoch",
    "hint",
    what="a DistributedSampler whose `set_epoch` is never called",
    why="every epoch then uses the data in the same order (torch 2.9.0 utils/data/distributed.py)",
    fix="call `sampler.set_epoch(epoch)` at the beginning of each epoch",
)
def _set_epoch(notebook: NotebookIndex) -> Iterator[Hit]:
    if "set_epoch" in notebook.called or notebook.managed or not notebook.loops:
        return
    if notebook.mentions("tpunb.training.Position"):  # calls set_epoch itself
        return
    for site in notebook.calls_of(*SAMPLERS):
        node = site.call
        names = {name.lower() for name in notebook.names_of(node)}
        names |= words(node.args[0]) if node.args else set()
        evaluates = any(EVALUATION.search(name) and "train" not in name for name in names)
        if literal(argument(node, "shuffle", 3)) is not False and not evaluates:
            yield Hit(site, "without set_epoch all epochs use the data in the same order")


@rule(
    "unequal-batches",
    "warning",
    what="data divided among the ranks with `data[rank::world_size]`, or "
    "`Subset(data, range(rank, n, world_size))`",
    why="if the length is not divisible, the parts differ by one sample; if that adds a batch on "
    "some ranks, the others never reach its collectives: the run hangs (torch 2.9.0 "
    "utils/data/distributed.py pads for this reason; not measured on a TPU)",
    fix="use DistributedSampler, or shorten to `len(data) // world_size * world_size` first",
)
def _unequal_batches(notebook: NotebookIndex) -> Iterator[Hit]:
    if notebook.multi:
        for site, start, step in [*_strides(notebook), *_ranges(notebook)]:
            counts = isinstance(step, ast.Name) or any(
                "world" in word or "replicas" in word for word in words(step)
            )
            if counts and notebook.depends_on_rank(start, site) and notebook.in_rank(site):
                shown = ast.unparse(site.node)
                yield Hit(site, f"`{shown}` may have a different length on each rank")


def _strides(notebook: NotebookIndex) -> Iterator[tuple[Site, ast.expr, ast.expr]]:
    """Yield slices like `data[rank::n]` with start and step."""
    # `data[rank::n].to(device)` is one batch, not several.
    moved = {id(getattr(site.call.func, "value", None)) for site in notebook.called.get("to", ())}
    for site in notebook.sites.subscripts:
        cut = site.node
        assert isinstance(cut, ast.Subscript)
        match cut.slice:
            case ast.Slice(lower=ast.expr() as start, upper=None, step=ast.expr() as step):
                if isinstance(cut.ctx, ast.Load) and id(cut) not in moved:
                    yield site, start, step


def _ranges(notebook: NotebookIndex) -> Iterator[tuple[Site, ast.expr, ast.expr]]:
    """Yield ranges that select a part of a data set, with start and step, unless the end is
    rounded.
    """
    for site in notebook.calls_of("range"):
        parts = site.call.args
        if len(parts) != 3 or not _selects(notebook, site):
            continue
        start, end, step = parts
        ends = [end, *(v.node for v in notebook.values(dotted(end), site.frame) if dotted(end))]
        if not any(isinstance(p, ast.FloorDiv | ast.Mod) for e in ends for p in ast.walk(e)):
            yield site, start, step


def _selects(notebook: NotebookIndex, site: Site) -> bool:
    """Whether a range is the indices of a part of a data set: `Subset(data, range(…))`."""
    todo, takers = [site.node], list[ast.Call]()
    while todo:
        value = todo.pop()
        loads = [load for n in notebook.names_of(value) for load in notebook.sites.loads(n)]
        for at in (Site(value, site.frame), *loads):
            takers += (found := notebook.calls_taking(at))
            todo += [taker for taker in found if last_part(taker.func) in ("list", "tuple")]
    subsets = ("Subset", "SubsetRandomSampler", "select")
    return any(last_part(taker.func) in subsets for taker in takers)


@rule(
    "many-workers",
    "warning",
    what="a DataLoader with 8 or more workers on each of several cores",
    why="every rank starts that many: 8 ranks with 8 workers are 64 processes, which share the "
    "machine's memory and /dev/shm; workers are killed (Bus error, or by the out-of-memory killer) "
    "(pytorch/xla#2690 and others like it)",
    fix="use num_workers=2 or fewer per core",
)
def _many_workers(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.multi or not notebook.runs_on_tpu:
        return
    for site in notebook.data_loaders:
        value = argument(site.call, "num_workers", 5)
        count = constant(notebook, value, site)
        everywhere = isinstance(value, ast.Call) and last_part(value.func) == "cpu_count"
        if ((type(count) is int and count >= 8) or everywhere) and _launched(notebook, site):
            shown = "as many workers as there are CPUs" if everywhere else f"{count} workers"
            yield Hit(site, f"each rank starts {shown} of its own")
