"""Which value of a metric is its best: the least loss, the most accuracy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tpunb.records import Row, metrics_of

_LESS = frozenset(
    "loss losses error err perplexity ppl mse mae rmse nll bpc wer cer fid divergence".split()
)
_MORE = frozenset(
    "acc accuracy auc auroc f1 precision recall score iou miou dice bleu rouge map mcc r2 psnr "
    "ssim reward return top1 top5".split()
)
"""Words in the names of metrics of which less is better, or more."""


@dataclass(frozen=True)
class Best:
    """The best value of a metric that a run has logged, or its last."""

    name: str
    value: float
    step: int | None
    last: bool = False
    """Nothing says which is better."""

    def __str__(self) -> str:
        """'best loss 0.1234 (step 40)', 'last lr 0.001'."""
        step = "" if self.step is None or self.last else f" (step {self.step:,})"
        return f"{'last' if self.last else 'best'} {self.name} {self.value:.4g}{step}"


def better(name: str) -> Callable[[float, float], bool] | None:
    """Whether one value of a metric is better than another; None if its name does not tell."""
    words = set(re.findall(r"[a-z]+[0-9]*", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()))
    if bool(words & _LESS) == bool(words & _MORE):
        return None
    return float.__lt__ if words & _LESS else float.__gt__


def of(rows: Iterable[Row]) -> list[Best]:
    """Of each metric the best value, in the order in which they came.

    `rows`: a row a step, reduced over ranks.
    """
    found: dict[str, Best] = {}
    for row in rows:
        for name, value in metrics_of(row).items():
            if math.isnan(value):
                continue
            is_better = better(name)
            if name not in found or is_better is None or is_better(value, found[name].value):
                found[name] = Best(name, float(value), row.get("step"), is_better is None)
    return list(found.values())
