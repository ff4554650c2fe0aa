"""Lint rules on collectives: calls that all ranks must make together."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from textwrap import shorten

from tpunb.notebook.lint.checks.rank_conditions import condition_on_rank, sure_branch
from tpunb.notebook.lint.checks.sites import words
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.rule_table import Hit, Rule, without_xla
from tpunb.notebook.scopes import XM, argument, last_part, literal

TOGETHER = {
    *(
        f"{XM}.{name}"
        for name in (
            *("optimizer_step", "reduce_gradients", "all_reduce", "all_gather", "all_to_all"),
            *("reduce_scatter", "collective_permute", "collective_broadcast", "rendezvous"),
            *("mesh_reduce", "broadcast_master_param", "do_on_ordinals"),
            "all_reduce_bucketized_gradients",
        )
    ),
    *(
        f"torch.distributed.{name}"
        for name in (
            *("all_reduce", "all_gather", "barrier", "broadcast", "reduce_scatter", "all_to_all"),
            *("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_object"),
            *("monitored_barrier", "broadcast_object_list"),
        )
    ),
}
SAVES = (f"{XM}.save", "torch_xla.utils.serialization.save")
ON_SOME_RANKS = "collective-on-some-ranks"


@Rule(
    ON_SOME_RANKS,
    "error",
    what="a collective, a rendezvous or `xm.optimizer_step` that only some ranks reach; a warning "
    "for `xm.save`",
    why="the ranks that call it wait for those that do not: the run hangs. `xm.save` computes the "
    "tensors on every rank and hangs if they depend on a collective; only the master writes (read "
    "in torch_xla 2.9.0 core/xla_model.py; pytorch/xla#2224, #2712)",
    fix="call it on every rank, and only print or write under the condition",
    several=True,
)
def _collective_on_some_ranks(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of(*sorted(TOGETHER), *SAVES):
        if _has_group(site.call):
            continue  # the test may select exactly its members
        test = condition_on_rank(notebook, site)
        if test is None or (site.frame.function is None and not notebook.in_rank(site)):
            continue
        name = last_part(site.call.func)
        if notebook.full(site.call.func, site) in SAVES:
            message = "`xm.save` should be called on every rank; only the master writes"
            yield Hit(site, message, "call it outside the condition", severity="warning")
            continue
        shown = shorten(ast.unparse(test), 60, placeholder=" …")
        where = sure_branch(notebook, site)
        yield Hit(
            site,
            f"`{name}` is called only on ranks with `{shown}` and waits forever for the others",
            # With the backend xla, dist.barrier() returns at once.
            certain=where is not None and (name != "barrier" or notebook.backend != "xla"),
            where=where,
        )


def _has_group(node: ast.Call) -> bool:
    """Whether a collective is limited to a group of ranks: `group=`, `groups=`, `replicas=`."""
    places = {"barrier": ("group", 0), "rendezvous": ("replicas", 2)}
    name, position = places.get(last_part(node.func), ("group", None))
    given = (argument(node, name, position), argument(node, "groups"))
    return any(part is not None and literal(part) is not None for part in given)


@Rule(
    "step-skipped",
    "warning",
    what="`continue` or `break` that depends on this rank's data, before the gradients are reduced",
    why="the other ranks wait for the gradients of the ranks that skip the step: the run hangs "
    "(follows from how collectives work; not measured on a TPU)",
    fix="decide by a value that is the same on all ranks, from `xm.all_reduce`; or stay on the "
    "device: `loss = torch.where(torch.isfinite(loss), loss, 0.0)` before the backward pass",
    several=True,
    fixes=without_xla(
        "decide by a value that is the same on all ranks, from `dist.all_reduce`; or stay on the "
        "device: `loss = torch.where(torch.isfinite(loss), loss, 0.0)` before the backward pass"
    ),
)
def _step_skipped(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.native:
        return
    for loop in notebook.loops:
        steps = [
            site
            for site in loop.sites
            if notebook.full(site.call.func, site) in TOGETHER
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
