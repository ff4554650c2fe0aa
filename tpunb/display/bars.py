"""Progress bars that libraries print as text, read back.

Those of tqdm, which transformers and Lightning use, and of fastprogress, which fastai uses.
"""

from __future__ import annotations

import re

from tpunb.events import Bar

# ' 45%|████▌     | 45/100 [00:01<00:02, 30.1it/s]', with a description in front of it
_TQDM = re.compile(
    r"^\s*(?P<name>.*?):?\s*\d+%\|[^|]*\|\s*(?P<done>[\d.]+)(?P<unit>[kMGT]?)/"
    r"(?P<total>[\d.]+)(?P<of>[kMGT]?)(?P<times>\s*\[\d.*)"
)
# 'Epoch 1/2 : |█████-----| 50.00% [2/4 00:01<00:01 0.5]'
_FASTPROGRESS = re.compile(
    r"^\s*(?P<name>.*?)\s*:?\s*\|[^|]*\|\s*[\d.]+%\s*(?=\[)"
    r"(?P<times>\[(?P<done>\d+)/(?P<total>\d+) \d.*)"
)
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def recognise(line: str) -> Bar | None:
    """The progress that a line shows; None if it shows none that is known."""
    if (found := _FASTPROGRESS.match(line)) is not None:
        return Bar(found["name"], int(found["done"]), int(found["total"]))
    if (found := _TQDM.match(line)) is None:
        return None
    done = float(found["done"]) * _UNITS[found["unit"]]
    total = float(found["total"]) * _UNITS[found["of"]]
    return Bar(found["name"].strip(), int(done), int(total))


def without_times(line: str) -> str:
    """A line without the elapsed and remaining time, if it is a progress bar."""
    found = _TQDM.match(line) or _FASTPROGRESS.match(line)
    return line if found is None else line[: found.start("times")]
