"""Lint rules on batches: the last one, sharding over the ranks, padding, workers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpunb.notebook.lint.checks.sites import constant, values_of, words
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.rule_table import TORCHTPU, TPUS, Hit, Rule, without_xla
from tpunb.notebook.scopes import Site, argument, last_part, literal

EVALUATION = re.compile(r"val|test|eval|dev|infer|pred|submi|holdout")


def _given(node: ast.expr | None) -> bool:
    """Whether an argument is present and not None or False."""
    return node is not None and literal(node) not in (None, False)


def _has_spread(node: ast.Call) -> bool:
    """Whether a call has `**` arguments, which may contain any name."""
    return any(word.arg is None for word in node.keywords)


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
    if _has_spread(node) or any(isinstance(part, ast.Starred) for part in node.args):
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


@Rule(
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
    if not notebook.on_device or not (notebook.loops or notebook.fits):
        return
    if notebook.imports("accelerate") and "prepare" in notebook.called:
        return  # accelerate fills the last batch
    for site in notebook.data_loaders:
        if site.cell.part == "kernel" or _drops(notebook, site) or _sharded(notebook, site):
            continue
        if _training(notebook, site):
            yield Hit(site, "the last batch of an epoch has a different shape from the others")


@Rule(
    "no-sampler",
    "warning",
    what="a training DataLoader on several cores without a DistributedSampler",
    why="every core processes all of the data, so an epoch takes as long as on one core "
    "(torch.utils.data: a DataLoader does not know about ranks)",
    fix="write `sampler=DistributedSampler(dataset, num_replicas=xr.world_size(), "
    "rank=xr.global_ordinal())`, and no `shuffle`",
    several=True,
    fixes=without_xla("write `sampler=DistributedSampler(dataset)`, and no `shuffle`"),
)
def _no_sampler(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.native or notebook.managed or not notebook.loops:
        return
    if "DistributedSampler" in notebook.called or _divided(notebook):
        return
    for site in notebook.data_loaders:
        node = site.call
        own = _given(argument(node, "sampler", 3)) or _given(argument(node, "batch_sampler", 4))
        if own or _has_spread(node) or _takes_rank(notebook, site):
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


@Rule(
    "unequal-batches",
    "warning",
    what="data divided among the ranks with `data[rank::world_size]`, or "
    "`Subset(data, range(rank, n, world_size))`",
    why="if the length is not divisible, the parts differ by one sample; if that adds a batch on "
    "some ranks, the others never reach its collectives: the run hangs (torch 2.9.0 "
    "utils/data/distributed.py pads for this reason; not measured on a TPU)",
    fix="use DistributedSampler, or shorten to `len(data) // world_size * world_size` first",
    several=True,
)
def _unequal_batches(notebook: NotebookIndex) -> Iterator[Hit]:
    for site, start, step in [*_strides(notebook), *_ranges(notebook)]:
        counts = isinstance(step, ast.Name) or any(
            "world" in word or "replicas" in word for word in words(step)
        )
        if counts and notebook.depends_on_rank(start, site) and notebook.in_rank(site):
            shown = ast.unparse(site.node)
            yield Hit(site, f"`{shown}` may have a different length on each rank")


def _strides(notebook: NotebookIndex) -> Iterator[tuple[Site, ast.expr, ast.expr]]:
    """Yield slices like `data[rank::n]` that are divided into batches, with start and step."""
    for site in notebook.sites.subscripts:
        cut = site.node
        assert isinstance(cut, ast.Subscript)
        match cut.slice:
            case ast.Slice(lower=ast.expr() as start, upper=None, step=ast.expr() as step):
                if isinstance(cut.ctx, ast.Load) and _is_iterated(notebook, site):
                    yield site, start, step


_BATCHES = re.compile(r"load|data|batch|len|enumerate|zip|tqdm|track|iter|range")
"""Functions that make batches of a sequence, or count them."""


def _is_iterated(notebook: NotebookIndex, site: Site) -> bool:
    """Whether a part of the data is more than one batch: a loop is over it, or it is passed to a
    data set or loader; not `model(x[rank::n])`. An attribute may be read anywhere.
    """
    names = notebook.names_of(site.node)
    if any("." in name for name in names):
        return True
    loops = {id(loop.node.iter) for loop in notebook.sites.loops if hasattr(loop.node, "iter")}
    for at in (site, *(load for name in names for load in notebook.sites.loads(name))):
        takers = notebook.calls_taking(at)
        if id(at.node) in loops or any(_BATCHES.search(last_part(t.func).lower()) for t in takers):
            return True
    return False


def _ranges(notebook: NotebookIndex) -> Iterator[tuple[Site, ast.expr, ast.expr]]:
    """Yield ranges that select a part of a data set, with start and step: `Subset(data, range(…))`,
    unless the end is rounded.
    """
    for name in ("Subset", "SubsetRandomSampler", "select"):
        for site in notebook.called.get(name, ()):
            for node in ast.walk(site.call):
                match node:
                    case ast.Call(func=ast.Name("range"), args=[start, end, step]):
                        values = [end, *(v.node for v in values_of(notebook, end, site))]
                        parts = (part for value in values for part in ast.walk(value))
                        if not any(isinstance(part, ast.FloorDiv | ast.Mod) for part in parts):
                            yield Site(node, site.frame), start, step


_MULTIPLE = "pad_to_multiple_of"
_PADDING = ("pad", "batch_encode_plus", "encode_plus")


@Rule(
    "dynamic-padding",
    "warning",
    what="a tokenizer or collator that pads to the longest text of a batch",
    why="every new length needs a new program: one report had 54 minutes of compiling for 34 s of "
    "work (pytorch/xla#2655)",
    fix="use `padding='max_length', max_length=128, truncation=True`, or `pad_to_multiple_of=64` "
    "for only a few lengths",
    backends=TPUS,
)
def _dynamic_padding(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.runs_on_tpu:
        return
    message = "each batch is padded to its own longest text"
    for site in notebook.calls_of("transformers.DataCollatorWithPadding"):
        if not any(word.arg in ("max_length", _MULTIPLE) for word in site.call.keywords):
            yield Hit(site, message)
    for name, sites in notebook.called.items():
        if "tokeniz" not in name.lower() and name not in _PADDING:
            continue
        for site in sites:
            longest = literal(argument(site.call, "padding")) in (True, "longest")
            # At the top level the whole data set gets one length.
            repeated = site.frame.function is not None or site.loop() is not None
            if longest and repeated and argument(site.call, _MULTIPLE) is None:
                yield Hit(site, message)


@Rule(
    "tpu-loader-workers",
    "warning",
    what="a DataLoader with worker processes in a notebook that uses the TPU",
    why="workers are forked from the process that holds the TPU: they may deadlock, and a tensor "
    "on the TPU in one of them raises 'cannot access or re-initialize TPU in a forked subprocess' "
    "(torch_tpu 0.2.0; Google's training examples keep num_workers=0)",
    fix="write num_workers=0",
    backends=TORCHTPU,
)
def _tpu_loader_workers(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.data_loaders:
        count = constant(notebook, argument(site.call, "num_workers", 5), site)
        context = argument(site.call, "multiprocessing_context", 10)
        forked = context is None or literal(context) in (None, "fork")
        if type(count) is int and count > 0 and forked and notebook.in_rank(site):
            yield Hit(site, f"{count} workers are forked from a process that holds the TPU")
