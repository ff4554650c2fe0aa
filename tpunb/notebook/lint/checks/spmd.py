"""Lint rules on SPMD, where one process drives all cores: calls that only ranks may make."""

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
    """Whether the mode was surely switched on, in the same process, when a site is come to."""
    for use in notebook.calls_of(USE):
        first = (use.cell.index, use.line) < (site.cell.index, site.line)
        plain = use.frame.function is None and use.simple()
        if first and plain and _same_process(use, site):
            return True
    return False


def _same_process(one: Site, other: Site) -> bool:
    """Whether one run has both: each train cell is a run, and skipped cells are in none."""
    parts = {one.cell.part, other.cell.part}
    return one.cell is other.cell or ("kernel" not in parts and parts != {"train"})


@rule(
    "spmd-late",
    "warning",
    what="xr.use_spmd() after a device was used",
    fact="tensors made before stay on one device; the process may end by SIGSEGV",
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
            yield Hit(site, "torch_xla.launch does not work once SPMD is on", certain=True)


@rule(
    "spmd-process-group",
    "error",
    what="torch.distributed's backend xla after xr.use_spmd()",
    fact="AssertionError: XLA backend is not supported with SPMD",
    source="measured with torch_xla 2.9.0; distributed/xla_backend.py",
    fix="leave the process group out: with SPMD there is one process on a host",
)
def _spmd_process_group(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of("torch.distributed.init_process_group"):
        backend = argument(call(site), "backend", 0)
        xla = isinstance(backend, ast.Constant) and backend.value == "xla"
        if xla and _before(notebook, site):
            yield Hit(site, "the backend xla does not work once SPMD is on", certain=True)


@rule(
    "spmd-collective",
    "warning",
    what="xm.all_reduce and its like in a notebook that uses SPMD",
    fact="they do nothing there, xr.world_size() being 1, and `scale` is left out as well; tensors "
    "are whole, so a mean over the batch is one over all cores",
    source="measured with torch_xla 2.9.0 on 4 CPU devices; core/xla_model.py",
    fix="leave it out",
)
def _spmd_collective(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of(*(f"{XM}.{name}" for name in REDUCTIONS)):
        if _before(notebook, site):
            yield Hit(site, f"`xm.{last_part(call(site).func)}` does nothing once SPMD is on")


@rule(
    "spmd-sampler",
    "warning",
    what="a DistributedSampler for several replicas in a notebook that uses SPMD",
    fact="the one process loads a part of the data only, and the rest is never seen",
    source="torch.utils.data.distributed: it gives each replica its part, and there is one",
    fix="leave the sampler out, load whole batches, and mark their sharding",
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
            yield Hit(site, "the sampler leaves out all but one replica's part of the data")


@rule(
    "sharded-value",
    "warning",
    what="the value of xs.mark_sharding, put into a variable",
    fact="it is a wrapper, as is all that is computed from it, and backward passes through it may "
    "end in 'isFunctionalTensor(t) INTERNAL ASSERT FAILED'; the tensor that was given is marked "
    "in place",
    source="measured with torch_xla 2.9.0: backward of cross_entropy",
    fix="write `xs.mark_sharding(x, …)` on a line of its own, and keep using `x`",
)
def _sharded_value(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.sites.assigns:
        value = getattr(site.node, "value", None)
        if isinstance(value, ast.Call) and notebook.full(value.func, site) in MARK:
            yield Hit(site, "what mark_sharding returns is a wrapper")
