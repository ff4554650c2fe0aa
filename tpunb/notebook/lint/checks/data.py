"""Lint rules on data loaders: the last batch, sharding over the ranks, workers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.names import argument, call, dotted, last_part, words
from tpunb.notebook.lint.rules import Hit, rule
from tpunb.notebook.lint.walk import Site

EVALUATION = re.compile(r"val|test|eval|dev|infer|pred|submi|holdout")
SAMPLERS = {
    "torch.utils.data.distributed.DistributedSampler",
    "torch.utils.data.DistributedSampler",
}


def _given(node: ast.expr | None) -> bool:
    """Whether an argument is present and not None or False."""
    return node is not None and not (isinstance(node, ast.Constant) and not node.value)


def _spread(node: ast.Call) -> bool:
    return any(word.arg is None for word in node.keywords) or any(
        isinstance(part, ast.Starred) for part in node.args
    )


def _training(notebook: NotebookIndex, site: Site) -> bool:
    """Whether a DataLoader is for training, judged by names."""
    node = call(site)
    names = words(node.args[0]) if node.args else set()
    dataset = argument(node, "dataset")
    names |= words(dataset) if dataset is not None else set()
    names |= {name.lower() for name in notebook.names_of(node)}
    shuffle = argument(node, "shuffle", 2)
    in_order = isinstance(shuffle, ast.Constant) and shuffle.value is False
    function = site.frame.function
    if function is not None and not in_order:
        names.add(function.name.lower())
    if not _is_used(notebook, site):
        return False
    if any("train" in name for name in names):
        return not any(EVALUATION.search(name) for name in names if "train" not in name)
    if any(EVALUATION.search(name) for name in names):
        return False
    return _given(argument(node, "shuffle", 2)) or _given(argument(node, "sampler", 3))


def _is_used(notebook: NotebookIndex, site: Site) -> bool:
    """Whether a loop or a function uses a loader, not just `next(iter(loader))`."""
    names = notebook.names_of(call(site))
    if not names or any("." in name for name in names):
        return True
    for load in (load for name in names for load in notebook.sites.loads(name)):
        takers = notebook.calls_taking(load)
        if not takers or last_part(takers[0].func) not in ("iter", "len", "print"):
            return True
        if any(getattr(loop.node, "iter", None) is takers[0] for loop in notebook.sites.loops):
            return True
    return False


def _sharded(notebook: NotebookIndex, site: Site) -> bool:
    """Whether a loader is passed to `tpunb.training.shard`, which makes all its batches full."""
    names = notebook.names_of(call(site))
    places = [site, *(load for name in names for load in notebook.sites.loads(name))]
    return any(
        last_part(taker.func) == "shard" for at in places for taker in notebook.calls_taking(at)
    )


def _drops(notebook: NotebookIndex, site: Site) -> bool:
    """Whether the last, smaller batch is or may be dropped."""
    node = call(site)
    value = argument(node, "drop_last", 8)
    if value is not None:
        return not (isinstance(value, ast.Constant) and value.value is False)
    if _spread(node) or _given(argument(node, "batch_sampler", 4)):
        return True
    size = argument(node, "batch_size", 1)
    # One sample per batch, explicitly or by default.
    if size is None or (isinstance(size, ast.Constant) and size.value in (1, None)):
        return True
    sampler = argument(node, "sampler", 3)
    values = [sampler]
    if isinstance(sampler, ast.Name):
        values = [v.node for v in notebook.values(sampler.id, site.frame)]  # type: ignore[misc]
    return any(
        isinstance(v, ast.Call)
        and last_part(v.func) in ("RandomSampler", "WeightedRandomSampler")
        and (_given(argument(v, "num_samples")) or len(v.args) > 1)
        for v in values
    )


@rule(
    "last-batch",
    "warning",
    what="a training DataLoader that keeps the last, smaller batch",
    fact="its shape needs a second program, which takes as long to compile as the first; if ranks "
    "have batches of different sizes, their collectives do not match",
    source="pytorch/xla#1368 on recompilation, #2020 on a hang at the end of an epoch",
    fix="write drop_last=True",
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
    fact="every core processes all of the data, so an epoch takes as long as on one core",
    source="torch.utils.data: a DataLoader does not know of ranks",
    fix="write `sampler=DistributedSampler(dataset, num_replicas=xr.world_size(), "
    "rank=xr.global_ordinal())`, and no `shuffle`",
)
def _no_sampler(notebook: NotebookIndex) -> Iterator[Hit]:
    if not (notebook.multi and notebook.xla) or notebook.managed or not notebook.loops:
        return
    if "DistributedSampler" in notebook.called or _divided(notebook):
        return
    for site in notebook.data_loaders:
        node = call(site)
        own = _given(argument(node, "sampler", 3)) or _given(argument(node, "batch_sampler", 4))
        own = own or any(_takes_rank(notebook, value) for value in _dataset(notebook, site))
        if own or _spread(node) or not _training(notebook, site) or not _launched(notebook, site):
            continue
        yield Hit(site, "every core loads all of the data")


def _dataset(notebook: NotebookIndex, site: Site) -> list[Site]:
    """The possible values of a DataLoader's data set."""
    given = argument(call(site), "dataset", 0)
    if isinstance(given, ast.Name):
        return notebook.values(given.id, site.frame)
    return [] if given is None else [Site(given, site.frame)]


def _takes_rank(notebook: NotebookIndex, value: Site) -> bool:
    """Whether a data set is constructed for a rank: `Rows(index)`."""
    parts = [*value.node.args] if isinstance(value.node, ast.Call) else []
    return any(notebook.depends_on_rank(part, value) for part in parts)


def _divided(notebook: NotebookIndex) -> bool:
    """Whether the notebook divides the data among the ranks itself."""
    if notebook.called.keys() & {"shard", "split_between_processes", "split_dataset_by_node"}:
        return True
    names = {"num_replicas", "num_shards", "rank", "world_size"}
    if any(word.arg in names for site in notebook.sites.calls for word in call(site).keywords):
        return True
    return any(
        isinstance(site.node, ast.Subscript) and notebook.depends_on_rank(site.node.slice, site)
        for site in notebook.sites.subscripts
    )


def _launched(notebook: NotebookIndex, site: Site) -> bool:
    """Whether ranks train with a loader: they construct it or read its name."""
    if notebook.in_rank(site):
        return True
    names = notebook.names_of(call(site))
    return any(notebook.in_rank(load) for name in names for load in notebook.sites.loads(name))


@rule(
    "sampler-and-shuffle",
    "error",
    what="a DataLoader with `shuffle=True` and a sampler",
    fact="ValueError: sampler option is mutually exclusive with shuffle",
    source="torch 2.9.0 utils/data/dataloader.py",
    fix="let the sampler shuffle: `DistributedSampler(..., shuffle=True)`",
)
def _sampler_and_shuffle(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.data_loaders:
        node = call(site)
        shuffle = argument(node, "shuffle", 2)
        sampler = argument(node, "sampler", 3)
        if not (isinstance(shuffle, ast.Constant) and shuffle.value is True) or sampler is None:
            continue
        values: list[ast.AST] = [sampler]
        if isinstance(sampler, ast.Name):
            values = [value.node for value in notebook.values(sampler.id, site.frame)]
        if values and all(isinstance(value, ast.Call) for value in values):
            yield Hit(
                site,
                "shuffle=True and a sampler are mutually exclusive",
                certain=isinstance(sampler, ast.Call),
            )


@rule(
    "set-epoch",
    "hint",
    what="a DistributedSampler whose `set_epoch` is never called",
    fact="every epoch then uses the data in the same order",
    source="torch 2.9.0 utils/data/distributed.py",
    fix="call `sampler.set_epoch(epoch)` at the beginning of each epoch",
)
def _set_epoch(notebook: NotebookIndex) -> Iterator[Hit]:
    if "set_epoch" in notebook.called or notebook.managed or not notebook.loops:
        return
    if notebook.mentions("tpunb.training.Position"):  # calls set_epoch itself
        return
    for site in notebook.calls_of(*sorted(SAMPLERS)):
        node = call(site)
        shuffle = argument(node, "shuffle", 3)
        if isinstance(shuffle, ast.Constant) and shuffle.value is False:
            continue
        names = {name.lower() for name in notebook.names_of(node)}
        names |= words(node.args[0]) if node.args else set()
        if any(EVALUATION.search(name) and "train" not in name for name in names):
            continue
        yield Hit(site, "without set_epoch all epochs use the data in the same order")


@rule(
    "unequal-batches",
    "warning",
    what="data divided among the ranks with `data[rank::world_size]`, or "
    "`Subset(data, range(rank, n, world_size))`",
    fact="if the length is not divisible, the parts differ by one sample; if that adds a batch on "
    "some ranks, the others never reach its collectives: the run hangs",
    source="torch 2.9.0 utils/data/distributed.py pads for this reason; not measured on a TPU",
    fix="use DistributedSampler, or shorten to `len(data) // world_size * world_size` first",
)
def _unequal_batches(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.multi:
        return
    # `data[rank::n].to(device)` is one batch, not several.
    moved = {
        id(function.value)
        for site in notebook.called.get("to", ())
        if isinstance(function := call(site).func, ast.Attribute)
    }
    for site in notebook.sites.subscripts:
        cut = site.node
        assert isinstance(cut, ast.Subscript)
        if not isinstance(cut.slice, ast.Slice) or not isinstance(cut.ctx, ast.Load):
            continue
        if cut.slice.step is None or cut.slice.lower is None or cut.slice.upper is not None:
            continue
        if id(cut) in moved:
            continue
        start, step = cut.slice.lower, cut.slice.step
        if not notebook.depends_on_rank(start, site) or not (
            _counts(step) or isinstance(step, ast.Name)
        ):
            continue
        if notebook.in_rank(site):
            yield Hit(site, f"`{ast.unparse(cut)}` may have a different length on each rank")
    for site in notebook.calls_of("range"):
        node = call(site)
        if len(node.args) != 3 or not notebook.in_rank(site) or not _selects(notebook, site):
            continue
        start, end, step = node.args
        ends = [end, *(v.node for v in notebook.values(dotted(end), site.frame) if dotted(end))]
        cut_off = any(isinstance(p, ast.FloorDiv | ast.Mod) for e in ends for p in ast.walk(e))
        counts = _counts(step) or isinstance(step, ast.Name)
        if notebook.depends_on_rank(start, site) and counts and not cut_off:
            yield Hit(site, f"`{ast.unparse(node)}` may have a different length on each rank")


def _selects(notebook: NotebookIndex, site: Site) -> bool:
    """Whether a range is the indices of a part of a data set: `Subset(data, range(…))`."""
    todo, takers = [site.node], list[ast.Call]()
    while todo:
        value = todo.pop()
        loads = [load for n in notebook.names_of(value) for load in notebook.sites.loads(n)]
        for place in (Site(value, site.frame), *loads):
            takers += (found := notebook.calls_taking(place))
            todo += [taker for taker in found if last_part(taker.func) in ("list", "tuple")]
    return any(last_part(taker.func) in _SUBSETS for taker in takers)


_SUBSETS = ("Subset", "SubsetRandomSampler", "select")


def _counts(node: ast.expr) -> bool:
    return any("world" in word or "replicas" in word for word in words(node))


@rule(
    "many-workers",
    "warning",
    what="a DataLoader with 8 or more workers on each of several cores",
    fact="every rank starts that many: 8 ranks with 8 workers are 64 processes, which share the "
    "machine's memory and /dev/shm; workers are killed (Bus error, or by the out-of-memory killer)",
    source="pytorch/xla#2690 and others like it",
    fix="use num_workers=2 or fewer per core",
)
def _many_workers(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.multi or not notebook.runs_on_tpu:
        return
    for site in notebook.data_loaders:
        value = argument(call(site), "num_workers", 5)
        if isinstance(value, ast.Name):
            loaders = [v.node for v in notebook.values(value.id, site.frame)]
            value = (
                loaders[0] if len(loaders) == 1 and isinstance(loaders[0], ast.Constant) else None
            )
        count = value.value if isinstance(value, ast.Constant) else None
        everywhere = isinstance(value, ast.Call) and last_part(value.func) == "cpu_count"
        if ((type(count) is int and count >= 8) or everywhere) and _launched(notebook, site):
            shown = "as many workers as there are CPUs" if everywhere else f"{count!r} workers"
            yield Hit(site, f"each rank starts {shown} of its own")


@rule(
    "pin-memory",
    "hint",
    what="`pin_memory=True` in a notebook for TPUs",
    fact="it only warns that no accelerator is found, and does not speed up copies",
    source="measured with torch 2.9.0 and torch_xla 2.9.0",
    fix="remove it",
)
def _pin_memory(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.xla:
        return
    for site in notebook.data_loaders:
        value = argument(call(site), "pin_memory", 7)
        if isinstance(value, ast.Constant) and value.value is True:
            yield Hit(site, "pinned memory only helps with GPUs")
            return
