"""How ranks are started, and what must not happen before."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpunb.lint.book import Book
from tpunb.lint.expressions import argument, call, dotted, last
from tpunb.lint.rules import Hit, rule
from tpunb.lint.walk import Site

SPAWN = "torch_xla.distributed.xla_multiprocessing.spawn"
LAUNCH = "torch_xla.launch"
ACCELERATE = ("accelerate.notebook_launcher", "accelerate.launchers.notebook_launcher")


@rule(
    "nprocs",
    "error",
    what="xmp.spawn with `nprocs` other than 1 or None, in a notebook without %%tpu_train",
    fact="ValueError: Unsupported nprocs",
    source="torch_xla 2.9.0 _internal/pjrt.py; since 2.6",
    fix="leave nprocs out to use every core, or put the call under %%tpu_train, where the number "
    "of cores is that of the run",
    kernel=True,
)
def _nprocs(book: Book) -> Iterator[Hit]:
    for site in book.calls_of(SPAWN):
        if site.page.part == "train" or book.in_rank(site):
            continue
        value = argument(call(site), "nprocs", 2)
        number = _number(book, value, site)
        if value is None or number in (1, None):
            continue
        yield Hit(site, f"xmp.spawn(nprocs={number}) raises ValueError: only 1 and None work")


def _number(book: Book, node: ast.AST | None, site: Site) -> int | None:
    """The number that an expression is; None where that is not known for certain."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        values = book.values(node.id, site.frame)
        found = {_number(book, v.node, v) for v in values if not isinstance(v.node, ast.Name)}
        if len(found) == 1:
            return found.pop()
    return None


@rule(
    "spawn-from-notebook",
    "error",
    what="torch_xla.launch or xmp.spawn with start method spawn and a function of the notebook",
    fact="a spawned process cannot find what was defined in a cell: BrokenProcessPool, or "
    "\"Can't get attribute '_mp_fn' on <module '__main__'>\"",
    source="measured with torch_xla 2.9.0; pytorch/xla#2750, #7761",
    fix="put the call under %%tpu_train, or pass start_method='fork'",
    kernel=True,
)
def _spawn_from_notebook(book: Book) -> Iterator[Hit]:
    for site in book.calls_of(LAUNCH, SPAWN):
        node = call(site)
        if site.page.part == "train" or book.in_rank(site) or book.one_process(site):
            continue
        target = argument(node, "fn", 0)
        name = last(target) if isinstance(target, ast.Name) else ""
        if not isinstance(target, ast.Lambda) and name not in book.functions:
            continue
        at = 2 if book.full(node.func, site) == LAUNCH else 5
        method = argument(node, "start_method", at)
        spread = any(word.arg is None for word in node.keywords)
        default = method is None and not spread
        if default or (isinstance(method, ast.Constant) and method.value == "spawn"):
            shown = f"`{name}`" if name else "the lambda"
            yield Hit(site, f"the start method is spawn, and {shown} is defined in the notebook")


@rule(
    "device-before-ranks",
    "error",
    what="an XLA device used before the ranks are started",
    fact="RuntimeError: Runtime is already initialized. Do not use the XLA device before calling "
    "xmp.spawn. Above a %%tpu_train cell it works, but every rank then runs these cells itself",
    source="measured with torch_xla 2.9.0; pytorch/xla#9303",
    fix="use devices only inside the function that is launched",
)
def _device_before_ranks(book: Book) -> Iterator[Hit]:
    launches = [site for site in book.launches if not book.one_process(site)]
    end = max(((site.page.index, site.line) for site in launches), default=(-1, 0))
    for site in book.device_uses:
        if site.frame.function is not None or site.page.part != "prelude":
            continue
        if book.has_train:
            yield Hit(
                site,
                "an XLA device is used above the %%tpu_train cell, so every rank runs all cells "
                "above it itself",
                "move it into the %%tpu_train cell, so that data is loaded once for all cores",
                severity="hint",
            )
            return
        if (site.page.index, site.line) < end:
            sure = not any(True for _ in site.conditions()) and site.simple()
            yield Hit(
                site,
                "an XLA device is used in the kernel before the ranks are started",
                severity=None if sure else "warning",
            )
            return


@rule(
    "device-number",
    "warning",
    what="a device asked for by the rank's number",
    fact="a process has one device, number 0: IndexError for any other number",
    source="measured with torch_xla 2.9.0; pytorch/xla#2338",
    fix="write `torch_xla.device()` without a number",
)
def _device_number(book: Book) -> Iterator[Hit]:
    for site in book.calls_of("torch_xla.device", "torch_xla.core.xla_model.xla_device"):
        function = site.frame.function
        value = argument(call(site), "n", 0) or argument(call(site), "index")
        if value is None or not (book.multi or book.launches) or not book.in_rank(site):
            continue
        if isinstance(value, ast.Constant) and type(value.value) is int and value.value > 0:
            yield Hit(site, f"device number {value.value}: a rank has only number 0")
        elif function is not None and dotted(value) and dotted(value) == book.index_of(function):
            yield Hit(
                site, "the device is asked for by the rank's number: a rank has only number 0"
            )


@rule(
    "accelerator-before-ranks",
    "error",
    what="an `Accelerator()` made before notebook_launcher is called",
    fact="ValueError: the `Accelerator` should only be initialized inside your training function",
    source="accelerate 1.15 launchers.py",
    fix="make the Accelerator inside the function that is launched",
)
def _accelerator_before_ranks(book: Book) -> Iterator[Hit]:
    launches = [s for s in book.calls_of(*ACCELERATE) if s.page.part == "prelude"]
    end = max(((s.page.index, s.line) for s in launches), default=(-1, 0))
    for site in book.calls_of("accelerate.Accelerator"):
        early = (site.page.index, site.line) < end
        if early and site.simple() and site.frame.function is None:
            yield Hit(site, "an Accelerator is made in the kernel, before notebook_launcher")


@rule(
    "processes-on-tpu",
    "hint",
    what="notebook_launcher with a number of processes, outside %%tpu_train",
    fact="on Colab's and Kaggle's TPUs the number is not used; on any other TPU machine accelerate "
    "starts that many GPU processes, and they fail",
    source="accelerate 1.15 launchers.py",
    fix="put the call under %%tpu_train, where the number of cores is that of the run",
)
def _processes_on_tpu(book: Book) -> Iterator[Hit]:
    for site in book.calls_of(*ACCELERATE):
        value = argument(call(site), "num_processes", 2)
        if value is None or site.page.part != "prelude" or book.one_process(site):
            continue
        yield Hit(site, "num_processes starts GPU processes where accelerate sees no TPU")
