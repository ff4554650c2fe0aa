"""Lint rules on SPMD, in which one process drives all cores: calls that are meant for ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpunb.notebook.lint.checks.starting import LAUNCH
from tpunb.notebook.lint.index import XM, NotebookIndex
from tpunb.notebook.lint.names import argument, call, last_part
from tpunb.notebook.lint.rules import Hit, rule
from tpunb.notebook.lint.walk import Site

USE = "torch_xla.runtime.use_spmd"
_MODULE = "torch_xla.distributed.spmd"
MARK = (f"{_MODULE}.mark_sharding", f"{_MODULE}.xla_sharding.mark_sharding")
REDUCTIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "mesh_reduce")


def _before(notebook: NotebookIndex, site: Site) -> bool:
    """Whether SPMD is certainly on, in the same process, when a site is reached."""
    for use in notebook.calls_of(USE):
        first = (use.cell.index, use.line) < (site.cell.index, site.line)
        plain = use.frame.function is None and use.simple()
        if first and plain and _same_process(use, site):
            return True
    return False


def _same_process(one: Site, other: Site) -> bool:
    """Whether both sites run in one process: each train cell is a run, others may be in none."""
    parts = {one.cell.part, other.cell.part}
    return one.cell is other.cell or ("kernel" not in parts and parts != {"train"})


@rule(
    "spmd-late",
    "warning",
    what="xr.use_spmd() after a device was used",
    fact="tensors made before it stay on one device; the process may end with SIGSEGV",
    source="measured with torch_xla 2.9.0 and several CPU devices",
    fix="call `xr.use_spmd()` right after the imports",
)
def _spmd_late(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of(USE):
        for use in notebook.device_uses:
            same = use.frame.function is site.frame.function and _same_process(use, site)
            if same and (use.cell.index, use.line) < (site.cell.index, site.line):
                yield Hit(site, "use_spmd() comes after an XLA device was used")
                break


@rule(
    "spmd-launch",
    "error",
    what="torch_xla.launch after xr.use_spmd()",
    # Quoted: torch_xla raises it.
    fact="NotImplementedError: launch function does not support SPMD at this time",
    source="measured with torch_xla 2.9.0; torch_xla.py",
    fix="call the function itself: with SPMD there is one process",
)
def _spmd_launch(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of(LAUNCH):
        if _before(notebook, site):
            yield Hit(site, "torch_xla.launch does not work after xr.use_spmd()", certain=True)


@rule(
    "spmd-process-group",
    "error",
    what="torch.distributed's backend xla after xr.use_spmd()",
    fact="AssertionError: XLA backend is not supported with SPMD",
    source="measured with torch_xla 2.9.0; distributed/xla_backend.py",
    fix="remove the process group: with SPMD there is one process per host",
)
def _spmd_process_group(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of("torch.distributed.init_process_group"):
        backend = argument(call(site), "backend", 0)
        xla = isinstance(backend, ast.Constant) and backend.value == "xla"
        if xla and _before(notebook, site):
            yield Hit(site, "the backend xla does not work after xr.use_spmd()", certain=True)


@rule(
    "spmd-collective",
    "warning",
    what="xm.all_reduce and other collectives in a notebook that uses SPMD",
    fact="xr.world_size() is 1, so they do nothing, not even apply `scale`; tensors are whole, so "
    "a mean over the batch is a mean over all cores",
    source="measured with torch_xla 2.9.0 on 4 CPU devices; core/xla_model.py",
    fix="remove it",
)
def _spmd_collective(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of(*(f"{XM}.{name}" for name in REDUCTIONS)):
        if _before(notebook, site):
            yield Hit(site, f"`xm.{last_part(call(site).func)}` does nothing after xr.use_spmd()")


@rule(
    "spmd-sampler",
    "warning",
    what="a DistributedSampler for several replicas in a notebook that uses SPMD",
    fact="the only process loads just a part of the data, and the rest is never used",
    source="torch.utils.data.distributed: it assigns a part to each replica, and there is only one",
    fix="remove the sampler, load whole batches, and mark their sharding",
)
def _spmd_sampler(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.called.get("DistributedSampler", ()):
        replicas = argument(call(site), "num_replicas", 1)
        if replicas is None or not _before(notebook, site):
            continue
        counts = isinstance(replicas, ast.Call) and notebook.full(replicas.func, site).endswith(
            "_runtime_device_count"
        )
        if counts or (isinstance(replicas, ast.Constant) and replicas.value not in (None, 1)):
            yield Hit(site, "the sampler drops the data of all replicas but one")


@rule(
    "sharded-value",
    "warning",
    what="the result of xs.mark_sharding, assigned to a variable",
    fact="it is a wrapper, and so is everything computed from it; backward passes through it may "
    "end in 'isFunctionalTensor(t) INTERNAL ASSERT FAILED'. The argument is marked in place",
    source="measured with torch_xla 2.9.0: backward of cross_entropy",
    fix="write `xs.mark_sharding(x, …)` on a line of its own, and keep using `x`",
)
def _sharded_value(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.sites.assigns:
        value = getattr(site.node, "value", None)
        if isinstance(value, ast.Call) and notebook.full(value.func, site) in MARK:
            yield Hit(site, "mark_sharding returns a wrapper, not the tensor")
