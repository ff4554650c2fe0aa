"""Lint rules on collectives: calls that all ranks must make together."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from textwrap import shorten

from tpunb.notebook.lint.index import RANK_CALLS, XM, NotebookIndex
from tpunb.notebook.lint.names import argument, call, last_part, literal, words
from tpunb.notebook.lint.rules import Hit, rule
from tpunb.notebook.lint.walk import ParsedCell, Site

TOGETHER = {
    f"{XM}.{name}"
    for name in (
        *("optimizer_step", "reduce_gradients", "all_reduce", "all_gather", "all_to_all"),
        *("reduce_scatter", "collective_permute", "collective_broadcast", "rendezvous"),
        *(
            "mesh_reduce",
            "broadcast_master_param",
            "do_on_ordinals",
            "all_reduce_bucketized_gradients",
        ),
    )
} | {
    f"torch.distributed.{name}"
    for name in (
        *("all_reduce", "all_gather", "barrier", "broadcast", "reduce_scatter", "all_to_all"),
        *(
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_gather_object",
            "monitored_barrier",
        ),
        *("broadcast_object_list",),
    )
}


def _one_rank(notebook: NotebookIndex, site: Site) -> ast.expr | None:
    """Return the condition under which a site runs on only some of the ranks, or None."""
    conditions = list(site.conditions())
    if any(_leaves_one_rank(notebook, test, holds, site) for test, holds in conditions):
        return None
    for test, holds in conditions:
        if notebook.depends_on_rank(test, site) and not _same_on_all(notebook, test, site):
            return None if _others_come_too(notebook, site, test, holds) else test
    return None


def _leaves_one_rank(notebook: NotebookIndex, test: ast.expr, holds: bool, site: Site) -> bool:
    """Whether a condition only holds in a run of a single rank: `world_size == 1 and …`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _leaves_one_rank(notebook, test.operand, not holds, site)
    if isinstance(test, ast.BoolOp):
        parts = [_leaves_one_rank(notebook, part, holds, site) for part in test.values]
        return any(parts) if isinstance(test.op, ast.And) == holds else all(parts)
    left, compare, right = _comparison(test)
    number = literal(right)
    if compare is None or type(number) is not int or not _is_world_size(notebook, left, site):
        return False
    return not any(compare(size, number) == holds for size in _around(number, 2, _MOST_RANKS))


def _same_on_all(notebook: NotebookIndex, test: ast.expr, site: Site) -> bool:
    """Whether a condition on the rank has the same result on every rank: `rank >= 0`,
    `rank < world_size`, `rank in range(world_size)`.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _same_on_all(notebook, test.operand, site)
    if isinstance(test, ast.BoolOp):
        return all(
            _same_on_all(notebook, part, site)
            for part in test.values
            if notebook.depends_on_rank(part, site)
        )
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.In | ast.NotIn):
        return len(test.ops) == 1 and _names_all(notebook, test.comparators[0], site)
    left, compare, right = _comparison(test)
    if compare is None or not isinstance(left, ast.Name | ast.Attribute | ast.Call):
        return False
    number = literal(right)
    if type(number) is int:
        ranks = _around(number, 0, (_cores(notebook) or _MOST_RANKS) - 1)
        return len({compare(rank, number) for rank in ranks}) == 1
    if isinstance(right, ast.BinOp) and isinstance(right.op, ast.Sub):  # world_size - 1
        bound = compare in (operator.le, operator.gt) and literal(right.right) == 1
        return bound and _is_world_size(notebook, right.left, site)
    return _is_world_size(notebook, right, site)


def _around(number: int, least: int, most: int) -> set[int]:
    """Return enough of the values from `least` to `most` for every result of a comparison."""
    near = (number - 1, number, number + 1)
    return {least, most, *(value for value in near if least <= value <= most)}


def _comparison(
    test: ast.expr,
) -> tuple[ast.expr, Callable[[int, int], bool] | None, ast.expr]:
    """Return both sides of a comparison, a number on the right; None if it is no comparison."""
    if not isinstance(test, ast.Compare) or len(test.ops) > 1:
        return test, None, test
    left, kind, right = test.left, type(test.ops[0]), test.comparators[0]
    if isinstance(left, ast.Constant):
        return right, COMPARISONS.get(_MIRRORED.get(kind, kind)), left
    return left, COMPARISONS.get(kind), right


def _names_all(notebook: NotebookIndex, ranks: ast.expr, site: Site) -> bool:
    """Whether a list or range certainly has every rank."""
    if isinstance(ranks, ast.Name):
        values = notebook.values(ranks.id, site.frame)
        return len(values) == 1 and _names_all_in(notebook, values[0].node, values[0])
    return _names_all_in(notebook, ranks, site)


def _names_all_in(notebook: NotebookIndex, ranks: ast.AST, site: Site) -> bool:
    if isinstance(ranks, ast.List | ast.Tuple | ast.Set):
        if len(ranks.elts) == 1 and isinstance(ranks.elts[0], ast.Starred):
            return _names_all_in(notebook, ranks.elts[0].value, site)
        cores = _cores(notebook)
        return cores is not None and {*range(cores)} <= {literal(part) for part in ranks.elts}
    if not isinstance(ranks, ast.Call) or ranks.keywords or not ranks.args:
        return False
    name = notebook.full(ranks.func, site)
    if name in ("list", "tuple", "set"):
        return _names_all_in(notebook, ranks.args[0], site)
    *first, end = ranks.args
    if name != "range" or [literal(part) for part in first] not in ([], [0]):
        return False
    number, cores = literal(end), _cores(notebook)
    if type(number) is int:
        return cores is not None and cores <= number
    return _is_world_size(notebook, end, site)


def _is_world_size(notebook: NotebookIndex, node: ast.expr, site: Site) -> bool:
    """Whether an expression is the number of ranks, by its name or its only value."""
    name = last_part(node.func if isinstance(node, ast.Call) else node).lower()
    if _WORLD_SIZE.fullmatch(name):
        return True
    values = notebook.values(node.id, site.frame) if isinstance(node, ast.Name) else []
    return len(values) == 1 and (
        isinstance(values[0].node, ast.Call) and _is_world_size(notebook, values[0].node, values[0])
    )


def _cores(notebook: NotebookIndex) -> int | None:
    """The number of cores in the options of the train cell, if there is only one."""
    trains = [cell for cell in notebook.cells if cell.part == "train"]
    if len(trains) != 1:
        return None
    match = next(filter(None, map(_CORES.match, trains[0].lines)), None)
    return int(match[1]) if match else None


_CORES = re.compile(r"%%tpu_train\b.*?--cores[ =]+(\d+)\b")
_WORLD_SIZE = re.compile(r"(get_|xrt_)?world_size")
_MOST_RANKS = 100_000
"""More ranks than any run has."""
_MIRRORED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
}


def _sure_branch(notebook: NotebookIndex, site: Site) -> Site | None:
    """Return the `if` around a site if it certainly holds on some ranks and not on others: its
    condition calls torch_xla, or uses a name that can only be the number of a rank.
    """
    frame = site.frame
    if not isinstance(frame.node, ast.If) or frame.parent is None:
        return None
    test = frame.node.test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    master = isinstance(test, ast.Call) and (
        notebook.full(test.func, site) == f"{XM}.is_master_ordinal"
        and notebook.names.sure(test.func)
    )
    sure = master or _is_rank(notebook, test, site) or _separates_ranks(notebook, test, site)
    return Site(frame.node, frame.parent) if sure else None


COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _separates_ranks(notebook: NotebookIndex, test: ast.expr, site: Site) -> bool:
    """Whether a comparison with a number has different results on ranks 0 and 1."""
    left, compare, right = _comparison(test)
    number = literal(right)
    if type(number) is not int or compare is None or not _is_rank(notebook, left, site):
        return False
    return compare(0, number) != compare(1, number)


def _is_rank(notebook: NotebookIndex, node: ast.expr, site: Site) -> bool:
    if isinstance(node, ast.Name):
        values = notebook.values(node.id, site.frame)
        function = site.frame.function
        if not values and function is not None and node.id == notebook.rank_parameter(function):
            return node.id not in function.stored
        return (
            len(values) == 1
            and isinstance(values[0].node, ast.Call)
            and (_is_rank(notebook, values[0].node, values[0]))
        )
    if not isinstance(node, ast.Call):
        return False
    return notebook.full(node.func, site) in RANK_CALLS and notebook.names.sure(node.func)


def _others_come_too(notebook: NotebookIndex, site: Site, test: ast.expr, holds: bool) -> bool:
    """Whether the other ranks make the same call under the opposite condition: in the `else`, or
    in another `if`, as when one rank downloads while the others wait.
    """
    name, (text, side) = last_part(call(site).func), _plain(test, holds)
    for other in notebook.called.get(name, ()):
        if other.frame.function is not site.frame.function or other is site:
            continue
        if any(_plain(t, h) == (text, not side) for t, h in other.conditions()):
            return True
    return False


def _plain(test: ast.expr, holds: bool) -> tuple[str, bool]:
    """Return a condition without `not` and `!=`, and whether it must hold."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _plain(test.operand, not holds)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right = ast.unparse(test.left), ast.unparse(test.comparators[0])
        if isinstance(test.ops[0], ast.Eq):
            return f"{left} == {right}", holds
        if isinstance(test.ops[0], ast.NotEq):
            return f"{left} == {right}", not holds
        if isinstance(test.ops[0], ast.Gt) and right == "0":  # of a rank: not the first
            return f"{left} == 0", not holds
    return ast.unparse(test), holds


ON_SOME_RANKS = "collective-on-some-ranks"


@rule(
    ON_SOME_RANKS,
    "error",
    what="a collective, a rendezvous or `xm.optimizer_step` that only some ranks reach",
    fact="the ranks that call it wait for those that do not: the run hangs",
    source="read in torch_xla 2.9.0 core/xla_model.py; pytorch/xla#2224, #2712",
    fix="call it on every rank, and only print or write under the condition",
)
def _collective_on_some_ranks(notebook: NotebookIndex) -> Iterator[Hit]:
    if not (notebook.multi or notebook.launches):
        return
    for site in notebook.calls_of(*sorted(TOGETHER)):
        if _has_group(call(site)):
            continue  # the test may select exactly its members
        test = _one_rank(notebook, site)
        if test is not None and (notebook.in_rank(site) or site.frame.function is not None):
            name = last_part(call(site).func)
            shown = shorten(ast.unparse(test), 60, placeholder=" …")
            where = _sure_branch(notebook, site)
            yield Hit(
                site,
                f"`{name}` is called only on ranks with `{shown}` and waits forever for the others",
                # The backend xla does not wait in a barrier: see barrier-does-not-wait.
                certain=where is not None and name != "barrier",
                where=where,
                several=True,
            )


def _has_group(node: ast.Call) -> bool:
    """Whether a collective is limited to a group of ranks: `group=`, `groups=`, `replicas=`."""
    places = {"barrier": ("group", 0), "rendezvous": ("replicas", 2)}
    name, position = places.get(last_part(node.func), ("group", None))
    given = (argument(node, name, position), argument(node, "groups"))
    return any(part is not None and literal(part) is not None for part in given)


@rule(
    "save-on-some-ranks",
    "warning",
    what="`xm.save` under a condition on the rank",
    fact="it computes the tensors on every rank and writes only on the master. If only one rank "
    "calls it, it hangs when their values depend on a collective; in old releases it always did",
    source="torch_xla 2.9.0 core/xla_model.py syncs before it checks who writes; pytorch/xla#2712",
    fix="call `xm.save` on every rank, outside the condition",
)
def _save_on_some_ranks(notebook: NotebookIndex) -> Iterator[Hit]:
    if not (notebook.multi or notebook.launches):
        return
    for site in notebook.calls_of(f"{XM}.save", "torch_xla.utils.serialization.save"):
        if _one_rank(notebook, site) is not None:
            yield Hit(site, "`xm.save` should be called on every rank; only the master writes")


@rule(
    "step-skipped",
    "warning",
    what="`continue` or `break` that depends on this rank's data, before the gradients are reduced",
    fact="the other ranks wait for the gradients of the ranks that skip the step: the run hangs",
    source="follows from how collectives work; not measured on a TPU",
    fix="decide by a value that is the same on all ranks, from `xm.all_reduce`; or stay on the "
    "device: `loss = torch.where(torch.isfinite(loss), loss, 0.0)` before the backward pass",
)
def _step_skipped(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.multi or not notebook.xla:
        return
    for loop in notebook.loops:
        steps = [
            site
            for site in loop.sites
            if notebook.full(call(site).func, site) in TOGETHER
            and not any(site.conditions(loop.frame))
        ]
        for jump in notebook.sites.jumps:
            if jump.loop() is not loop.frame or not notebook.in_rank(jump):
                continue
            if not any(step.line > jump.line for step in steps):
                continue
            for test, _ in jump.conditions(loop.frame):
                if _of_the_data(test):
                    shown = shorten(ast.unparse(test), 60, placeholder=" …")
                    yield Hit(jump, f"only the ranks with `{shown}` skip the rest of the step")
                    break


def _of_the_data(test: ast.expr) -> bool:
    """Whether a condition depends on values: of a loss, with isnan, or with item()."""
    return bool(words(test) & {"isnan", "isinf", "isfinite", "item", "loss", "math.isnan", "numel"})


@rule(
    "reduce-average",
    "error",
    what="torch.distributed's ReduceOp.AVG on XLA tensors",
    fact="ValueError: Invalid reduce op",
    source="measured with torch_xla 2.9.0; distributed/xla_backend.py lists the known operations",
    fix="use ReduceOp.SUM and divide by the number of ranks",
)
def _reduce_average(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.xla:
        return
    for site in notebook.sites.attributes("AVG"):
        full = notebook.full(site.node, site)
        if full.startswith("torch.distributed.") and full.endswith("ReduceOp.AVG"):
            yield Hit(site, "the XLA process group does not support ReduceOp.AVG")


@rule(
    "summed-gradients",
    "warning",
    what="gradients that are summed over the cores and not divided by their number",
    fact="each step is as many times as long as there are cores: the learning rate that works on "
    "one core diverges",
    source="torch_xla 2.9.0 core/xla_model.py: xm.reduce_gradients scales by 1 / world size, "
    "xm.all_reduce does not",
    fix="write `xm.reduce_gradients(optimizer)`, or `scale=1 / xr.world_size()` in the all-reduce",
)
def _summed_gradients(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of(f"{XM}.all_reduce", "torch.distributed.all_reduce"):
        if not _on_cores(notebook, site) or not _sums(notebook, site):
            continue
        node = call(site)
        ours = notebook.full(node.func, site).startswith("torch_xla")
        reduced = argument(node, "inputs", 1) if ours else argument(node, "tensor", 0)
        if reduced is None or not _is_gradient(notebook, reduced, site):
            continue
        if not any(_scales(cell.tree) for cell in _cells_of(notebook, site)):
            yield Hit(site, "the gradients are summed over the cores, not averaged")


def _sums(notebook: NotebookIndex, site: Site) -> bool:
    """Whether an all-reduce sums, without a scale."""
    node = call(site)
    if notebook.full(node.func, site).startswith("torch_xla"):
        kind = argument(node, "reduce_type", 0)
        summed = literal(kind) == "sum" or (kind is not None and last_part(kind) == "REDUCE_SUM")
        return summed and argument(node, "scale", 2) is None
    kind = argument(node, "op", 1)
    return kind is None or last_part(kind) == "SUM"


def _is_gradient(notebook: NotebookIndex, node: ast.AST, site: Site) -> bool:
    if any(isinstance(part, ast.Attribute) and part.attr == "grad" for part in ast.walk(node)):
        return True
    values = notebook.values(node.id, site.frame) if isinstance(node, ast.Name) else []
    return len(values) == 1 and any(
        isinstance(part, ast.Attribute) and part.attr == "grad" for part in ast.walk(values[0].node)
    )


def _cells_of(notebook: NotebookIndex, site: Site) -> list[ParsedCell]:
    """The cell of a site, and those with the functions of a program that runs it."""
    programs = [program for program in notebook.programs if site in program]
    reached = set[int]().union(*(program.functions for program in programs))
    cells = {f.outer.cell.index for f in notebook.sites.functions if id(f.node) in reached}
    cells |= {program.cell.index for program in programs if program.cell is not None}
    return [cell for cell in notebook.cells if cell.index in {site.cell.index, *cells}]


def _scales(tree: ast.AST) -> bool:
    """Whether code divides or multiplies: it may be by the number of cores."""
    return any(
        (isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult))
        or (isinstance(node, ast.Attribute) and node.attr in ("div", "div_", "mul", "mul_"))
        for node in ast.walk(tree)
    )


@rule(
    "rate-by-rank",
    "warning",
    what="an optimizer whose learning rate depends on the rank",
    fact="the gradients are the same on all cores, the steps are not: the models drift apart",
    source="follows from the code",
    fix="use one learning rate on all cores",
)
def _rate_by_rank(notebook: NotebookIndex) -> Iterator[Hit]:
    for full, sites in notebook.named.items():
        for site in sites if full.startswith("torch.optim.") else ():
            rate = argument(call(site), "lr", 1)
            if rate is not None and _of_rank(notebook, rate, site) and _on_cores(notebook, site):
                yield Hit(site, f"`lr={ast.unparse(rate)}` is another one on each core")


def _on_cores(notebook: NotebookIndex, site: Site) -> bool:
    """Whether several ranks run a site."""
    return any(site in program for program in notebook.programs if not program.alone)


def _of_rank(notebook: NotebookIndex, node: ast.AST, site: Site, depth: int = 0) -> bool:
    """Whether a value is certainly computed from the number of the rank."""
    for part in ast.walk(node):
        if isinstance(part, ast.expr) and _is_rank(notebook, part, site):
            return True
        if isinstance(part, ast.Name) and depth < 2:
            values = notebook.values(part.id, site.frame)
            if len(values) == 1 and _of_rank(notebook, values[0].node, values[0], depth + 1):
                return True
    return False


_SEEDS = ("torch.manual_seed", "torch.random.manual_seed", f"{XM}.set_rng_state")
_ALIKE = {
    *("broadcast_master_param", "DistributedDataParallel", "DDP", "FullyShardedDataParallel"),
    *("XlaFullyShardedDataParallel", "FSDP", "load_state_dict", "from_pretrained", "broadcast"),
    *("all_reduce", "collective_broadcast", "broadcast_object_list", "prepare", "load"),
}
"""Calls after which all ranks may have the same model."""


@rule(
    "seed-by-rank",
    "warning",
    what="a model that is made after `torch.manual_seed` with the number of the rank",
    fact="each core starts with other weights, and averaging the gradients keeps them apart",
    source="follows from the code; torch_xla 2.9.0: xm.broadcast_master_param makes them alike",
    fix="make the model with one seed on all cores and seed by rank below it, or call "
    "`xm.broadcast_master_param(model)`",
)
def _seed_by_rank(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.loops or _ALIKE & notebook.called.keys():
        return
    for site in notebook.calls_of(*_SEEDS):
        seed = argument(call(site), "seed", 0)
        if seed is None or not _of_rank(notebook, seed, site) or not _on_cores(notebook, site):
            continue
        below = [
            other
            for other in notebook.sites.calls
            if other.cell is site.cell
            and other.frame.function is site.frame.function
            and other.line > site.line
        ]
        again = [o.line for o in below if notebook.full(call(o).func, o) in _SEEDS]
        for other in below:
            if _makes_model(notebook, other) and not any(line < other.line for line in again):
                seeded = f"line {site.line} seeds each of them differently"
                yield Hit(other, f"the cores start with different weights: {seeded}")
                break


def _makes_model(notebook: NotebookIndex, site: Site) -> bool:
    full, name = notebook.full(call(site).func, site), last_part(call(site).func)
    if full in ("torch.nn.Linear", "torch.nn.Sequential", "torch.nn.Embedding"):
        return True
    return any(last_part(base).endswith("Module") for base in notebook.bases.get(name, ()))


@rule(
    "barrier-does-not-wait",
    "warning",
    what="`dist.barrier()` in a notebook that uses torch_xla",
    fact="with the backend xla it returns at once",
    source="measured with torch_xla 2.9.0: 0.00 s although another rank is 0.5 s late",
    fix="write `xm.rendezvous('name')`",
)
def _barrier_does_not_wait(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.xla or not notebook.multi:
        return
    for site in notebook.calls_of("torch.distributed.barrier"):
        if argument(call(site), "group", 0) is None and notebook.in_rank(site):
            yield Hit(site, "`dist.barrier()` does not wait with the backend xla")


@rule(
    "sync-batch-norm",
    "error",
    what="torch.nn.SyncBatchNorm on several cores",
    fact="ValueError: SyncBatchNorm expected input tensor to be on GPU",
    source="torch 2.9.0 nn/modules/batchnorm.py; seen on 2 rehearsal ranks",
    fix="use `torch_xla.core.functions.SyncBatchNorm`, or let each core normalise its own batch",
)
def _sync_batch_norm(notebook: NotebookIndex) -> Iterator[Hit]:
    if not (notebook.multi and notebook.xla):
        return
    for site in [
        *notebook.calls_of("torch.nn.SyncBatchNorm"),
        *notebook.calls_of("torch.nn.SyncBatchNorm.convert_sync_batchnorm"),
    ]:
        yield Hit(site, "torch's SyncBatchNorm does not work on XLA tensors")
