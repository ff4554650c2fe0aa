"""What all ranks must do together."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from textwrap import shorten

from tpunb.lint.book import XM, Book
from tpunb.lint.expressions import argument, call, last, words
from tpunb.lint.rules import Hit, rule
from tpunb.lint.walk import Site

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


def _one_rank(book: Book, site: Site) -> ast.expr | None:
    """The test under which a site runs on some of the ranks only, None if there is none."""
    for test, holds in site.conditions():
        if book.asks_rank(test, site):
            return None if _others_come_too(book, site, test, holds) else test
    return None


def _others_come_too(book: Book, site: Site, test: ast.expr, holds: bool) -> bool:
    """Whether the other ranks make the same call under the opposite condition: in the `else`,
    or in an `if` of their own, as where one rank downloads and the others wait before it.
    """
    name, (text, side) = last(call(site).func), _plain(test, holds)
    for other in book.called.get(name, ()):
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


@rule(
    "collective-on-some-ranks",
    "error",
    what="a collective, a rendezvous or `xm.optimizer_step` that only some ranks come to",
    fact="the ranks that call it wait for those that do not: the run hangs",
    source="read in torch_xla 2.9.0 core/xla_model.py; pytorch/xla#2224, #2712",
    fix="let every rank call it, and only print or write under the condition",
)
def _collective_on_some_ranks(book: Book) -> Iterator[Hit]:
    if not (book.multi or book.launches):
        return
    for site in book.calls_of(*sorted(TOGETHER)):
        test = _one_rank(book, site)
        if test is not None and (book.in_rank(site) or site.frame.function is not None):
            name = last(call(site).func)
            shown = shorten(ast.unparse(test), 60, placeholder=" …")
            yield Hit(
                site, f"`{name}` is called only on ranks with `{shown}`: the others never come"
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
def _save_on_some_ranks(book: Book) -> Iterator[Hit]:
    if not (book.multi or book.launches):
        return
    for site in book.calls_of(f"{XM}.save", "torch_xla.utils.serialization.save"):
        if _one_rank(book, site) is not None:
            yield Hit(site, "`xm.save` asks for the master itself, and every rank should call it")


@rule(
    "step-skipped",
    "warning",
    what="`continue` or `break` over a value of this rank's data, before the gradients are reduced",
    fact="ranks that go on wait for the gradients of those that left: the run hangs",
    source="follows from how collectives work; not measured on a TPU",
    fix="decide with a value that is the same on all ranks, as `xm.all_reduce` or "
    "`xm.mesh_reduce` give it, or multiply the loss by zero in place of leaving",
)
def _step_skipped(book: Book) -> Iterator[Hit]:
    if not book.multi or not book.xla:
        return
    for loop in book.loops:
        steps = [
            site
            for site in loop.sites
            if book.full(call(site).func, site) in TOGETHER and not any(site.conditions(loop.frame))
        ]
        for jump in book.sites.jumps:
            if jump.loop() is not loop.frame or not book.in_rank(jump):
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
def _reduce_average(book: Book) -> Iterator[Hit]:
    if not book.xla:
        return
    for site in book.sites.attributes("AVG"):
        full = book.full(site.node, site)
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
def _barrier_does_not_wait(book: Book) -> Iterator[Hit]:
    if not book.xla or not book.multi:
        return
    for site in book.calls_of("torch.distributed.barrier"):
        if argument(call(site), "group", 0) is None and book.in_rank(site):
            yield Hit(site, "`dist.barrier()` does not wait on the backend xla")


@rule(
    "sync-batch-norm",
    "error",
    what="torch.nn.SyncBatchNorm on several cores",
    fact="ValueError: SyncBatchNorm expected input tensor to be on GPU",
    source="torch 2.9.0 nn/modules/batchnorm.py; seen on 2 rehearsal ranks",
    fix="use `torch_xla.core.functions.SyncBatchNorm`, or leave batch norm to each core",
)
def _sync_batch_norm(book: Book) -> Iterator[Hit]:
    if not (book.multi and book.xla):
        return
    for site in [
        *book.calls_of("torch.nn.SyncBatchNorm"),
        *book.calls_of("torch.nn.SyncBatchNorm.convert_sync_batchnorm"),
    ]:
        yield Hit(site, "torch's SyncBatchNorm does not work on XLA tensors")
