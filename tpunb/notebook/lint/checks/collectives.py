"""Lint rules on collectives: calls that all ranks must make together."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from textwrap import shorten

from tpunb.notebook.lint.index import RANK_CALLS, XM, NotebookIndex
from tpunb.notebook.lint.names import argument, call, last_part, literal, words
from tpunb.notebook.lint.rules import Hit, rule
from tpunb.notebook.lint.walk import Site

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
    """The test under which a site runs on some of the ranks only, None if there is none."""
    for test, holds in site.conditions():
        if notebook.asks_rank(test, site):
            return None if _others_come_too(notebook, site, test, holds) else test
    return None


def _sure_branch(notebook: NotebookIndex, site: Site) -> Site | None:
    """The `if` that a site stands in, where it surely holds on some of the ranks and not on
    others: it asks torch_xla, or a name that can be nothing but a rank's number.
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
    sure = master or _is_rank(notebook, test, site) or _tells_apart(notebook, test, site)
    return Site(frame.node, frame.parent) if sure else None


COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _tells_apart(notebook: NotebookIndex, test: ast.expr, site: Site) -> bool:
    """Whether a comparison with a number comes out differently for ranks 0 and 1."""
    if not isinstance(test, ast.Compare) or len(test.ops) > 1:
        return False
    number, compare = literal(test.comparators[0]), COMPARISONS.get(type(test.ops[0]))
    if type(number) is not int or compare is None or not _is_rank(notebook, test.left, site):
        return False
    return compare(0, number) != compare(1, number)


def _is_rank(notebook: NotebookIndex, node: ast.expr, site: Site) -> bool:
    if isinstance(node, ast.Name):
        values = notebook.values(node.id, site.frame)
        function = site.frame.function
        if not values and function is not None and node.id == notebook.index_of(function):
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
    """Whether the other ranks make the same call under the opposite condition: in the `else`,
    or in an `if` of their own, as where one rank downloads and the others wait before it.
    """
    name, (text, side) = last_part(call(site).func), _plain(test, holds)
    for other in notebook.called.get(name, ()):
        if other.frame.function is not site.frame.function or other is site:
            continue
        if any(_plain(t, h) == (text, not side) for t, h in other.conditions()):
            return True
    return False


def _plain(test: ast.expr, holds: bool) -> tuple[str, bool]:
    """A condition without `not` and `!=`, and whether it holds."""
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
    what="a collective, a rendezvous or `xm.optimizer_step` that only some ranks come to",
    fact="the ranks that call it wait for those that do not: the run hangs",
    source="read in torch_xla 2.9.0 core/xla_model.py; pytorch/xla#2224, #2712",
    fix="let every rank call it, and only print or write under the condition",
)
def _collective_on_some_ranks(notebook: NotebookIndex) -> Iterator[Hit]:
    if not (notebook.multi or notebook.launches):
        return
    for site in notebook.calls_of(*sorted(TOGETHER)):
        test = _one_rank(notebook, site)
        if test is not None and (notebook.in_rank(site) or site.frame.function is not None):
            name = last_part(call(site).func)
            shown = shorten(ast.unparse(test), 60, placeholder=" …")
            where = _sure_branch(notebook, site)
            yield Hit(
                site,
                f"`{name}` is called only on ranks with `{shown}`: the others never come",
                certain=where is not None,
                where=where,
                several=True,
            )


@rule(
    "save-on-some-ranks",
    "warning",
    what="`xm.save` under a condition on the rank",
    fact="it computes the tensors on every rank and writes on the master only. Called on one rank, "
    "it hangs if their values wait for a collective; in old releases it always did",
    source="torch_xla 2.9.0 core/xla_model.py syncs before it asks who writes; pytorch/xla#2712",
    fix="call `xm.save` on every rank, outside the condition",
)
def _save_on_some_ranks(notebook: NotebookIndex) -> Iterator[Hit]:
    if not (notebook.multi or notebook.launches):
        return
    for site in notebook.calls_of(f"{XM}.save", "torch_xla.utils.serialization.save"):
        if _one_rank(notebook, site) is not None:
            yield Hit(site, "`xm.save` asks for the master itself, and every rank should call it")


@rule(
    "step-skipped",
    "warning",
    what="`continue` or `break` over a value of this rank's data, before the gradients are reduced",
    fact="the other ranks wait for the gradients of those that left: the run hangs",
    source="follows from how collectives work; not measured on a TPU",
    fix="decide with a value that is the same on all ranks, as `xm.all_reduce` or "
    "`xm.mesh_reduce` give it, or multiply the loss by zero in place of leaving",
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
                    yield Hit(jump, f"this rank leaves the step alone, if `{shown}`")
                    break


def _of_the_data(test: ast.expr) -> bool:
    """Whether a test looks at values: of a loss, with isnan, or with item()."""
    return bool(words(test) & {"isnan", "isinf", "isfinite", "item", "loss", "math.isnan", "numel"})


@rule(
    "reduce-average",
    "error",
    what="torch.distributed's ReduceOp.AVG on XLA tensors",
    fact="ValueError: Invalid reduce op",
    source="measured with torch_xla 2.9.0; distributed/xla_backend.py lists what it knows",
    fix="use ReduceOp.SUM and divide by the number of ranks",
)
def _reduce_average(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.xla:
        return
    for site in notebook.sites.attributes("AVG"):
        full = notebook.full(site.node, site)
        if full.startswith("torch.distributed.") and full.endswith("ReduceOp.AVG"):
            yield Hit(site, "the XLA process group has no AVG")


@rule(
    "barrier-does-not-wait",
    "warning",
    what="`dist.barrier()` in a notebook that uses torch_xla",
    fact="on the backend xla it returns at once",
    source="measured with torch_xla 2.9.0: 0.00 s beside a rank that is 0.5 s late",
    fix="write `xm.rendezvous('name')`",
)
def _barrier_does_not_wait(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.xla or not notebook.multi:
        return
    for site in notebook.calls_of("torch.distributed.barrier"):
        if argument(call(site), "group", 0) is None and notebook.in_rank(site):
            yield Hit(site, "`dist.barrier()` does not wait on the backend xla")


@rule(
    "sync-batch-norm",
    "error",
    what="torch.nn.SyncBatchNorm on several cores",
    fact="ValueError: SyncBatchNorm expected input tensor to be on GPU",
    source="torch 2.9.0 nn/modules/batchnorm.py; seen on 2 rehearsal ranks",
    fix="use `torch_xla.core.functions.SyncBatchNorm`, or leave batch norm to each core",
)
def _sync_batch_norm(notebook: NotebookIndex) -> Iterator[Hit]:
    if not (notebook.multi and notebook.xla):
        return
    for site in [
        *notebook.calls_of("torch.nn.SyncBatchNorm"),
        *notebook.calls_of("torch.nn.SyncBatchNorm.convert_sync_batchnorm"),
    ]:
        yield Hit(site, "torch's SyncBatchNorm does not work on XLA tensors")
