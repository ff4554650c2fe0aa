"""Rewrites each use of a name of torch_xla."""

from __future__ import annotations

import ast
from collections.abc import Callable

from tpunb.notebook import removed_apis
from tpunb.notebook.migrate.torchtpu.ddp import wrap_in_ddp
from tpunb.notebook.migrate.torchtpu.edits import Edits
from tpunb.notebook.migrate.torchtpu.loaders import on_device
from tpunb.notebook.migrate.torchtpu.table import advice
from tpunb.notebook.removed_apis import PL, XMP, XR
from tpunb.notebook.scopes import XM, literal

AMP = "torch_xla.amp"
_PROFILER = "torch_xla.debug.profiler"
AUTOCAST = "torch.autocast"
_OPERATIONS = {"sum": "SUM", "mul": "PRODUCT", "min": "MIN", "max": "MAX"}
_KIND = "torch.accelerator.current_accelerator().type.upper()"
UNSURE = "It may also be your own name: check it."
EAGER = "removed: TorchTPU runs each operation at once"
SIMPLE_PARENTS = (ast.If, ast.While, ast.IfExp, ast.BoolOp, ast.Assign, ast.Return, ast.keyword)

Handler = Callable[[Edits, ast.Call], bool]
"""Rewrites a call; False, without a change, if that is not possible."""


def rewrite_uses(edits: Edits) -> None:
    """Rewrite the uses of all names of torch_xla, or mark them."""
    names = edits.names
    for node in _uses(edits):
        if node in edits.done:
            continue
        found = {_current(name) for name in names.full_names(node)}
        known = sorted(name for name in found if name.startswith("torch_xla") or name == AUTOCAST)
        used = any(name.startswith("torch_xla") for name in names.full_names(node))
        parent = names.parents[node]
        if not used or (isinstance(parent, ast.Attribute) and _leads_on(edits, parent)):
            continue
        edits.done |= set(ast.walk(node))
        if len(found) > 1:
            edits.mark(node, UNSURE)
        elif not _rewrite(edits, node, known[0]):
            edits.mark(node, advice(known[0]))


def _current(name: str) -> str:
    """The full name by its row in the table of removed names."""
    row = removed_apis.lookup_name(name)
    by_hand = row is None or row.new is None or name.endswith((".ParallelLoader", ".DataParallel"))
    return name if by_hand or row is None or row.new is None else row.new


def _uses(edits: Edits) -> list[ast.expr]:
    """All names that are read; first those whose rewrite may remove the statement around them."""
    nodes = [
        node
        for _, node in edits.names.walk()
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
    ]
    return sorted(nodes, key=lambda node: REPORTS.isdisjoint(edits.names.full_names(node)))


def _leads_on(edits: Edits, parent: ast.Attribute) -> bool:
    """Whether an attribute is still a name of torch_xla, not one of its objects' attributes."""
    return any(name.startswith("torch_xla") for name in edits.names.full_names(parent))


def _rewrite(edits: Edits, node: ast.expr, full: str) -> bool:
    call = edits.names.parents[node]
    if isinstance(call, ast.Call) and call.func is node:
        if full in CALLS:
            return CALLS[full](edits, call)
        if full in NAMED:
            return edits.fill(node, NAMED[full])
        return False
    value = VALUES.get(full) or NAMED.get(full)
    if value is None:
        return False
    if value.startswith("torch."):
        edits.module("torch")
    return edits.fill(node, value)


def _expression(make: Callable[[Edits, ast.AST], str]) -> Handler:
    """A call whose arguments do not matter."""
    return lambda edits, call: edits.fill(call, make(edits, call))


def _torch(text: str) -> Handler:
    def handler(edits: Edits, call: ast.Call) -> bool:
        return edits.fill(call, edits.module("torch") + text)

    return handler


def _device(edits: Edits, call: ast.Call) -> bool:
    return edits.fill(call, f'{edits.module("torch")}.device("tpu")')


def _sync(edits: Edits, call: ast.Call) -> bool:
    given = edits.given(call, "wait", "reset_scope")
    if given and literal(given.get("wait")) not in (..., False):
        return edits.fill(call, f"{edits.module('torch')}.accelerator.synchronize()")
    return edits.drop(call, EAGER) or edits.fill(call, "None")


def _step(edits: Edits, call: ast.Call) -> bool:
    """What `unindent_steps` left: a step beside another context, or one with a long string."""
    return edits.fill(call, f"{edits.module('contextlib')}.nullcontext()")


def _seed(edits: Edits, call: ast.Call) -> bool:
    given = edits.given(call, "seed", "device")
    if not given or "seed" not in given:
        return False
    return edits.fill(call, f"{edits.module('torch')}.manual_seed({{0}})", [given["seed"]])


def _optimizer_step(edits: Edits, call: ast.Call) -> bool:
    given = edits.given(call, "optimizer", "barrier", "optimizer_args", "groups", "pin_layout")
    if given is None or "optimizer" not in given or "groups" in given:
        return False
    optimizer, extra = given["optimizer"], given.get("optimizer_args")
    slots = [optimizer] if extra is None else [optimizer, extra]
    step = "{0}.step()" if extra is None else "{0}.step(**{1})"
    where = edits.where(call)
    if where in ("single", "kernel") or (where == "ranks" and wrap_in_ddp(edits, call, optimizer)):
        return edits.fill(call, step, slots)
    statement = edits.names.statement(call)
    cell = edits.names.cell_of(call)
    if not isinstance(statement, ast.Expr) or not edits.names.is_alone(statement):
        return False
    averages = f"{edits.helper('average_gradients')}({cell.code(optimizer)})"
    if not isinstance(optimizer, ast.Name | ast.Attribute | ast.Subscript):
        return False
    return edits.fill(call, f"{averages}\n{cell.indent(statement.lineno - 1)}{step}", slots)


def _reduce_gradients(edits: Edits, call: ast.Call) -> bool:
    given = edits.given(call, "optimizer", "groups", "pin_layout")
    if given is None or "optimizer" not in given or "groups" in given:
        return False
    return edits.fill(call, f"{edits.helper('average_gradients')}({{0}})", [given["optimizer"]])


def _fetch_gradients(edits: Edits, call: ast.Call) -> bool:
    if len(call.args) != 1:
        return False
    gradients = "[p.grad for g in {0}.param_groups for p in g['params'] if p.grad is not None]"
    return edits.fill(call, gradients, call.args)


def _all_reduce(edits: Edits, call: ast.Call) -> bool:
    given = edits.given(call, "reduce_type", "inputs", "scale", "groups", "pin_layout")
    if given is None or "groups" in given or "inputs" not in given:
        return False
    operation = _operation(edits, given.get("reduce_type"))
    if operation is None:
        return False
    slots = [given[name] for name in ("inputs", "scale") if name in given]
    rest = ", scale={1}" if "scale" in given else ""
    text = f"{edits.helper('all_reduced')}({operation}, {{0}}{rest})"
    return edits.fill(call, text, slots)


def _operation(edits: Edits, node: ast.expr | None) -> str | None:
    name = literal(node)
    if node is not None and not isinstance(name, str):
        full = next(iter(edits.names.full_names(node)), "")
        name = full.rpartition("REDUCE_")[2].lower() if full.startswith(f"{XM}.REDUCE_") else ""
    if not isinstance(name, str) or name not in _OPERATIONS:
        return None
    return f"{edits.module('dist')}.ReduceOp.{_OPERATIONS[name]}"


def _all_gather(edits: Edits, call: ast.Call) -> bool:
    given = edits.given(call, "value", "dim", "groups", "output", "pin_layout")
    if given is None or "value" not in given or given.keys() & {"groups", "output"}:
        return False
    slots = [given[name] for name in ("value", "dim") if name in given]
    rest = ", dim={1}" if "dim" in given else ""
    return edits.fill(call, f"{edits.helper('all_gathered')}({{0}}{rest})", slots)


def _mesh_reduce(edits: Edits, call: ast.Call) -> bool:
    given = edits.given(call, "tag", "data", "reduce_fn")
    if given is None or not given.keys() >= {"data", "reduce_fn"}:
        return False
    text = f"{edits.helper('mesh_reduced')}({{0}}, {{1}})"
    return edits.fill(call, text, [given["data"], given["reduce_fn"]])


def _broadcast(edits: Edits, call: ast.Call) -> bool:
    if len(call.args) != 1:
        return False
    return edits.fill(call, f"{edits.helper('broadcast_parameters')}({{0}})", call.args)


def _rendezvous(edits: Edits, call: ast.Call) -> bool:
    if not isinstance(edits.names.parents[call], ast.Expr) or len(arguments_of(call)) != 1:
        return False
    where = edits.where(call)
    if where in ("single", "kernel"):
        return edits.drop(call, "removed: there is only one process here")
    dist = edits.module("dist")
    if where == "ranks":
        return edits.fill(call, f"{dist}.barrier()")
    return edits.fill(call, f"{dist}.barrier() if {dist}.is_initialized() else None")


def arguments_of(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(word.value for word in call.keywords)]


def _is_master(edits: Edits, call: ast.Call) -> bool:
    if edits.where(call) == "single":
        return edits.fill(call, "True")
    parent = edits.names.parents[call]
    text = edits.is_rank_0(call)
    return edits.fill(call, text if isinstance(parent, SIMPLE_PARENTS) else f"({text})")


def _master_print(edits: Edits, call: ast.Call) -> bool:
    own = [word for word in call.keywords if word.arg not in ("local", "flush")]
    if own:
        return False
    end = ""
    if edits.where(call) != "single":
        guarded = edits.on_rank_0(call)
        if guarded is None:
            return False
        end = guarded
    slots = ", ".join(f"{{{index}}}" for index in range(len(call.args)))
    return edits.fill(
        call, f"print({slots}, flush=True){end}" if slots else f"print(){end}", call.args
    )


def _save(edits: Edits, call: ast.Call) -> bool:
    given = edits.given(call, "data", "file_or_path", "master_only", "global_master")
    if given is None or not given.keys() >= {"data", "file_or_path"}:
        return False
    only = literal(given.get("master_only"))
    if "master_only" in given and not isinstance(only, bool):
        return False
    end = ""
    if only is not False and edits.where(call) != "single":
        guarded = edits.on_rank_0(call)
        if guarded is None:
            return False
        end = guarded
    text = f'{edits.module("torch")}.save({edits.helper("to_device")}({{0}}, "cpu"), {{1}}){end}'
    return edits.fill(call, text, [given["data"], given["file_or_path"]])


def _step_closure(edits: Edits, call: ast.Call) -> bool:
    given = edits.given(call, "closure", "args", "run_async")
    if given is None or "closure" not in given:
        return False
    closure, args = given["closure"], given.get("args")
    called = "{0}" if isinstance(closure, ast.Name | ast.Attribute) else "({0})"
    return _call_with(edits, call, f"{called}(", closure, args)


def _call_with(
    edits: Edits, call: ast.Call, head: str, fn: ast.expr, args: ast.expr | None
) -> bool:
    """Write a call of `fn` with the values of a tuple."""
    if args is None:
        return edits.fill(call, f"{head.removesuffix(', ')})", [fn])
    if isinstance(args, ast.Tuple) and not any(isinstance(e, ast.Starred) for e in args.elts):
        slots = ", ".join(f"{{{index}}}" for index in range(1, len(args.elts) + 1))
        head = head if slots else head.removesuffix(", ")
        return edits.fill(call, f"{head}{slots})", [fn, *args.elts])
    return edits.fill(call, f"{head}*{{1}})", [fn, args])


def _launch(edits: Edits, call: ast.Call) -> bool:
    order = ("fn", "args", "start_method", "debug_single_process", "nprocs", "join", "daemon")
    given = edits.given(call, *order)
    statement = edits.names.statement(call)
    if (
        given is None
        or "fn" not in given
        or not isinstance(given["fn"], ast.Name | ast.Attribute)
        or not isinstance(statement, ast.Expr)
        or statement.value is not call
        or not edits.names.is_alone(statement)
        or edits.where(call) != "ranks"
    ):
        return False
    edits.launches.append((edits.names.line(call), edits.names.cell_of(call).index))
    rank = f"{edits.module('dist')}.get_rank()"
    if edits.code.has_group:  # in the function
        rank = f'int({edits.module("os")}.environ["RANK"])'
    head = f"{{0}}({rank}, "
    return _call_with(edits, call, head, given["fn"], given.get("args"))


def _autocast(edits: Edits, call: ast.Call) -> bool:
    given = edits.given(call, "device", "enabled", "dtype", "cache_enabled")
    if given is None:
        return False
    torch = edits.module("torch")
    words = [name for name in ("enabled", "dtype", "cache_enabled") if name in given]
    rest = "".join(f", {name}={{{at}}}" for at, name in enumerate(words))
    dtype = "" if "dtype" in words else f", dtype={torch}.bfloat16"
    return edits.fill(call, f'{torch}.autocast("tpu"{rest}{dtype})', [given[w] for w in words])


def _compile(edits: Edits, call: ast.Call) -> bool:
    given = edits.given(call, "f", "full_graph", "name", "num_different_graphs_allowed")
    if given is None or "f" not in given:
        return False
    return edits.fill(call, f"{edits.module('torch')}.compile({{0}})", [given["f"]])


def _first(edits: Edits, call: ast.Call) -> bool:
    """A wrapper around its first argument, which is left out."""
    return len(call.args) == 1 and edits.fill(call, "{0}", call.args)


def _to_device(edits: Edits, call: ast.Call) -> bool:
    if len(call.args) != 2:
        return False
    return edits.fill(call, f"{edits.helper('to_device')}({{0}}, {{1}})", call.args)


def _record(edits: Edits, call: ast.Call) -> bool:
    if not call.args:
        return False
    text = f"{edits.module('torch')}.profiler.record_function({{0}})"
    return edits.fill(call, text, call.args[:1])


def _cache(edits: Edits, call: ast.Call) -> bool:
    return edits.drop(
        call,
        "removed: TorchTPU keeps compiled programs where TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT "
        "says, which must be set before torch is imported",
    )


def _precision(edits: Edits, call: ast.Call) -> bool:
    value = literal(call.args[0]) if len(call.args) == 1 and not call.keywords else ...
    if value not in ("default", "high", "highest"):
        return False
    written = "medium" if value == "default" else value
    text = f'{edits.module("torch")}.set_float32_matmul_precision("{written}")'
    return edits.fill(call, text)


def _samples(edits: Edits, call: ast.Call) -> bool:
    """`SampleGenerator(data=…, sample_count=…)`: the same data, many times."""
    given = edits.given(call, "data", "sample_count")
    if given is None or len(given) != 2:
        return False
    return edits.fill(call, "[{0}] * ({1})", [given["data"], given["sample_count"]])


def _helper(name: str) -> Handler:
    return lambda edits, call: edits.fill(call, f"{edits.helper(name)}()")


def _without_effect(why: str) -> Handler:
    return lambda edits, call: edits.drop(call, f"removed: {why}")


def _report(edits: Edits, call: ast.Call) -> bool:
    """`print(met.metrics_report())`: leave the statement out."""
    around = edits.names.parents[call]
    if not isinstance(around, ast.Call) or around.args != [call]:
        return False
    return edits.drop(around, "removed: torch_xla's metrics; use torch.profiler")


_METRICS = "torch_xla.debug.metrics"
REPORTS = {
    *(f"{_METRICS}.metrics_report", f"{_METRICS}.short_metrics_report"),
    "torch_xla._XLAC._xla_metrics_report",
}
CALLS: dict[str, Handler] = {
    "torch_xla.device": _device,
    "torch_xla.sync": _sync,
    "torch_xla.step": _step,
    "torch_xla.manual_seed": _seed,
    "torch_xla.launch": _launch,
    "torch_xla.compile": _compile,
    f"{XM}.optimizer_step": _optimizer_step,
    f"{XM}.reduce_gradients": _reduce_gradients,
    f"{XM}._fetch_gradients": _fetch_gradients,
    f"{XM}.all_reduce": _all_reduce,
    f"{XM}.all_gather": _all_gather,
    f"{XM}.mesh_reduce": _mesh_reduce,
    f"{XM}.broadcast_master_param": _broadcast,
    f"{XM}.rendezvous": _rendezvous,
    f"{XM}.is_master_ordinal": _is_master,
    f"{XM}.master_print": _master_print,
    f"{XM}.save": _save,
    f"{XM}.add_step_closure": _step_closure,
    f"{XM}.wait_device_ops": _torch(".accelerator.synchronize()"),
    f"{XM}.xla_device_hw": _torch(_KIND.removeprefix("torch")),
    f"{XM}.send_cpu_data_to_device": _to_device,
    f"{XM}.set_rng_state": _seed,
    f"{XR}.device_type": _torch(_KIND.removeprefix("torch")),
    f"{XR}.world_size": _expression(Edits.world),
    f"{XR}.global_device_count": _expression(Edits.world),
    f"{XR}.global_runtime_device_count": _expression(Edits.world),
    f"{XR}.global_ordinal": _expression(Edits.rank),
    f"{XR}.local_ordinal": _expression(Edits.local_rank),
    f"{XR}.initialize_cache": _cache,
    "torch_xla.backends.set_mat_mul_precision": _precision,
    "torch_xla._XLAC._xla_set_mat_mul_precision": _precision,
    f"{PL}.MpDeviceLoader": on_device,
    f"{PL}.ParallelLoader": on_device,
    f"{XMP}.MpModelWrapper": _first,
    f"{XMP}.MpSerialExecutor": _helper("OneAtATime"),
    f"{XM}.RateTracker": _helper("RateTracker"),
    "torch_xla.utils.utils.SampleGenerator": _samples,
    "torch_xla.experimental.eager_mode": _without_effect("TorchTPU is eager"),
    f"{XR}.set_device_type": _without_effect("TorchTPU's device is in its name"),
    f"{XM}.optimization_barrier_": _without_effect("it only concerns XLA's compiler"),
    **dict.fromkeys(
        (f"{_METRICS}.{name}" for name in ("clear_all", "clear_metrics", "clear_counters")),
        _without_effect("torch_xla's metrics; use torch.profiler"),
    ),
    f"{AMP}.autocast": _autocast,
    AUTOCAST: _autocast,
    **dict.fromkeys(REPORTS, _report),
    f"{_PROFILER}.Trace": _record,
    f"{_PROFILER}.StepTrace": _record,
}
NAMED = {
    f"{AMP}.syncfree.Adam": "torch.optim.Adam",
    f"{AMP}.syncfree.AdamW": "torch.optim.AdamW",
    f"{AMP}.syncfree.SGD": "torch.optim.SGD",
    "torch_xla.utils.checkpoint.checkpoint": "torch.utils.checkpoint.checkpoint",
}
"""Names that only change, called or not."""
VALUES = {"torch_xla.__version__": "torch.__version__", "torch_xla.compile": "torch.compile"}
"""Names that change where they are not called: `@torch_xla.compile`."""
