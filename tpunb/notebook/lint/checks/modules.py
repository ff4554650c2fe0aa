"""Lint rules on modules of torch that behave differently on an XLA device."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpunb.notebook.lint.frameworks import is_training_arguments
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.names import (
    argument,
    call,
    dotted,
    for_other_hardware,
    last_part,
    literal,
    words,
)
from tpunb.notebook.lint.rules import Hit, rule
from tpunb.notebook.lint.walk import DefinedFunction, Site

TIED = {
    f"transformers.{name}"
    for name in (
        *("GPT2LMHeadModel", "GPTNeoForCausalLM", "OPTForCausalLM", "BloomForCausalLM"),
        *("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "T5Model"),
        *("BartForConditionalGeneration", "MBartForConditionalGeneration", "MarianMTModel"),
        *("BertForMaskedLM", "BertForPreTraining", "RobertaForMaskedLM", "AlbertForMaskedLM"),
        *("XLMRobertaForMaskedLM", "DistilBertForMaskedLM", "ElectraForMaskedLM"),
        *("DebertaV2ForMaskedLM", "XLNetLMHeadModel", "PegasusForConditionalGeneration"),
    )
}
"""Models of transformers that share weights by default (each was tested with 5.23)."""


@rule(
    "untied-weights",
    "warning",
    what="modules that share a weight, moved to the XLA device and trained",
    fact="the move creates a new parameter for each module, so they no longer share it and are "
    "trained separately",
    source="measured with torch 2.9.0, torch_xla 2.9.0 and transformers 5.23: one more parameter "
    "after `.to(device)`, with different values after a step",
    fix="tie them again after `.to(device)`: `model.head.weight = model.embedding.weight`, or "
    "`model.tie_weights()` of transformers; then create the optimizer",
)
def _untied_weights(notebook: NotebookIndex) -> Iterator[Hit]:
    if notebook.managed or not notebook.loops or "tie_weights" in notebook.called:
        return
    moves = [
        site
        for site in notebook.called.get("to", ())
        if call(site).args
        and isinstance(call(site).func, ast.Attribute)
        and notebook.is_xla_device(call(site).args[0], site)
    ]
    for move in moves:
        if name := _tied_by_transformers(notebook, move):
            yield Hit(move, f"`{name}` shares weights, and `.to(device)` separates them")
    ties = list(_ties(notebook))
    for tie in ties:
        method = _method(tie)
        if method is None:
            left = dotted(tie.node.targets[0])  # type: ignore[attr-defined]
            after = [move for move in moves if _moves(notebook, move, left) and _later(move, tie)]
            again = any(_later(other, move) for other in ties for move in after)
        else:
            assert method.method_of is not None
            after = [move for move in moves if _makes(notebook, move, method.method_of.name)]
            again = any(_called_outside(notebook, _method(other)) for other in ties)
        if after and not again:
            shown = ast.unparse(tie.node)
            yield Hit(tie, f"`.to(device)` undoes `{shown}`: each module gets its own parameter")


def _ties(notebook: NotebookIndex) -> Iterator[Site]:
    """Yield statements like `self.head.weight = self.embedding.weight`."""
    for site in notebook.sites.assigns:
        node = site.node
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            left, right = dotted(node.targets[0]), dotted(node.value)
            one = left.partition(".")[0] == right.partition(".")[0]
            if one and left != right and all(name.endswith(".weight") for name in (left, right)):
                yield site


def _method(tie: Site) -> DefinedFunction | None:
    function = tie.frame.function
    return function if function is not None and function.method_of is not None else None


def _later(site: Site, other: Site) -> bool:
    return (site.cell.index, site.line) > (other.cell.index, other.line)


def _receiver(move: Site) -> ast.expr:
    function = call(move).func
    assert isinstance(function, ast.Attribute)
    return function.value


def _moves(notebook: NotebookIndex, move: Site, left: str) -> bool:
    return dotted(_receiver(move)) == left.partition(".")[0]


def _makers(notebook: NotebookIndex, move: Site) -> Iterator[tuple[ast.Call, Site]]:
    """Yield the calls that may have constructed the moved model: `net = Net()` above
    `net.to(device)`, also if a function takes it as a parameter of the same name.
    """
    receiver, function = _receiver(move), move.frame.function
    values = notebook.values(name, move.frame) if (name := dotted(receiver)) else []
    if function is not None and not values and name in function.parameters:
        values = notebook.values(name, function.outer)
    for value in values or [Site(receiver, move.frame)]:
        for node in ast.walk(value.node):
            if isinstance(node, ast.Call):
                yield node, value


def _tied_by_transformers(notebook: NotebookIndex, move: Site) -> str | None:
    for node, value in _makers(notebook, move):
        maker = node.func
        if isinstance(maker, ast.Attribute) and maker.attr == "from_pretrained":
            maker = maker.value
        if (full := notebook.full(maker, value)) in TIED:
            return full.rpartition(".")[2]
    return None


def _makes(notebook: NotebookIndex, move: Site, name: str) -> bool:
    """Whether the moved model is or contains an instance of a class of the notebook."""
    made = {
        function.method_of.name: {last_part(call(site).func) for site in function.calls}
        for function in notebook.functions.get("__init__", ())
        if function.method_of is not None
    }
    holders: set[str] = set()
    more = {name}
    while more:
        holders |= more
        more = {outer for outer, inner in made.items() if inner & holders} - holders
    return any(last_part(node.func) in holders for node, _ in _makers(notebook, move))


def _called_outside(notebook: NotebookIndex, method: DefinedFunction | None) -> bool:
    """Whether a tying method is called from outside its class; True for a tie outside classes."""
    if method is None:
        return True
    return any(
        dotted(call(site).func) != f"self.{method.name}"
        for site in notebook.called.get(method.name, ())
        if method.name != "__init__"
    )


@rule(
    "torch-checkpoint",
    "error",
    what="torch.utils.checkpoint, or transformers' gradient checkpointing, on an XLA device",
    fact="AttributeError: module 'torch' has no attribute 'xla'",
    source="measured with torch 2.9.0, torch_xla 2.9.0 and transformers 5.23",
    fix="use `from torch_xla.utils.checkpoint import checkpoint` with `use_reentrant=True`; for a "
    "library's model, wrap its layers in `torch_xla.distributed.fsdp.checkpoint_module`",
)
def _torch_checkpoint(notebook: NotebookIndex) -> Iterator[Hit]:
    for name in filter(is_training_arguments, notebook.called if notebook.runs_on_tpu else ()):
        for site in notebook.called[name]:
            given = literal(argument(call(site), "gradient_checkpointing"))
            if given is True and not for_other_hardware(site):
                what = "`gradient_checkpointing=True` uses torch.utils.checkpoint"
                yield Hit(site, f"{what}, which fails on XLA tensors", "remove it")
    if not notebook.device_uses:
        return
    module = "torch.utils.checkpoint"
    for site in notebook.calls_of(f"{module}.checkpoint", f"{module}.checkpoint_sequential"):
        if notebook.names.sure(call(site).func) and not for_other_hardware(site):
            yield Hit(site, f"`{last_part(call(site).func)}` from {module} fails on XLA tensors")
    if notebook.imports("transformers"):
        for name in ("gradient_checkpointing_enable", "activation_checkpointing_enable"):
            for site in notebook.called.get(name, ()):
                if not for_other_hardware(site):
                    yield Hit(site, f"`{name}` uses {module}, which fails on XLA tensors")


@rule(
    "frozen-batch-norm",
    "warning",
    what="batch norm layers in eval mode in a model that is trained",
    fact="a backward pass through batch norm in eval mode raises RuntimeError: The size of mean "
    "should be compatible with feature count",
    source="measured with torch_xla 2.9.0, also if its parameters need no gradient",
    fix="use `torchvision.ops.FrozenBatchNorm2d` instead, or freeze all layers before it as well, "
    "so that no gradient passes through it",
)
def _frozen_batch_norm(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.device_uses or not notebook.loops:
        return
    frozen = [
        *(site for site in notebook.sites.assigns if _freezes(site.node)),
        *notebook.called.get("freeze", ()),
        *(s for s in notebook.called.get("requires_grad_", ()) if _is_false(call(s), 0)),
    ]
    if any(not _of_batch_norm(site) for site in frozen):
        return  # the frozen layers may be all those before the batch norm
    for site in notebook.called.get("eval", ()):
        function = call(site).func
        if isinstance(function, ast.Attribute) and _of_batch_norm(site):
            yield Hit(site, "no gradient can pass a batch norm in eval mode on an XLA device")


def _freezes(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assign)
        and literal(node.value) is False
        and any(isinstance(t, ast.Attribute) and t.attr == "requires_grad" for t in node.targets)
    )


def _is_false(node: ast.Call, position: int) -> bool:
    return literal(argument(node, "requires_grad", position)) is False


def _of_batch_norm(site: Site) -> bool:
    """Whether a site is under `if isinstance(module, nn.BatchNorm2d)` or a similar condition."""
    for test, holds in site.conditions():
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, holds = test.operand, not holds
        if holds and any("batchnorm" in word for word in words(test)):
            return True
    return False


SMALL = 32
"""Batch size above which the variance is less than 3 % off."""


@rule(
    "biased-variance",
    "hint",
    what="BatchNorm1d that is trained with a batch of 32 or less on each core",
    fact="on an XLA device the squared deviations in `running_var` are divided by n, elsewhere by "
    "n - 1: evaluation then differs from that on a GPU",
    source="measured with torch_xla 2.9.0: with a batch of 4 it is 0.75 of the CPU's",
    fix="use a larger batch on each core, or LayerNorm",
)
def _biased_variance(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.device_uses or not notebook.loops or "Conv1d" in notebook.called:
        return  # after a Conv1d, n is the batch size times the length
    sizes = {_size(notebook, argument(call(s), "batch_size", 1), s) for s in notebook.data_loaders}
    known = [size for size in sizes if isinstance(size, int)]
    if not known or len(known) < len(sizes) or not 1 < max(known) <= SMALL:
        return
    for site in filter(notebook.is_live, notebook.calls_of("torch.nn.BatchNorm1d")):
        percent = round(100 / max(known))
        yield Hit(site, f"with {max(known)} samples `running_var` is {percent} % too small")


@rule(
    "embedding-bag",
    "warning",
    what="nn.EmbeddingBag in a model on an XLA device",
    fact="XLA has no such operator: in every step its inputs are computed and copied to the CPU",
    source="measured with torch_xla 2.9.0: aten::_embedding_bag runs on the CPU",
    fix="use `nn.Embedding`, and take the sum or mean over the ids of a bag",
)
def _embedding_bag(notebook: NotebookIndex) -> Iterator[Hit]:
    if notebook.device_uses:
        for site in filter(notebook.is_live, notebook.calls_of("torch.nn.EmbeddingBag")):
            yield Hit(site, "EmbeddingBag runs on the CPU, in every step")


def _size(notebook: NotebookIndex, node: ast.expr | None, site: Site) -> object:
    """The value of a batch size; None if it is not known."""
    if isinstance(node, ast.Name):
        values = notebook.values(node.id, site.frame)
        node = values[0].node if len(values) == 1 else None  # type: ignore[assignment]
    value = literal(node)
    return value if type(value) is int else None
