"""What a saved notebook must be after a run that has printed very much."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter

LINES = 25_000
RANKS = 4
TRAIN = f"""%%tpu_train --cores {RANKS}
import tpunb
from tqdm.auto import tqdm
for step in tqdm(tpunb.track(range({LINES}), name="step"), mininterval=0.1):
    print("rank", os.environ["RANK"], "step", step, "of many")
    if step % 1000 == 0:
        tpunb.log(step=step, loss=1 / (step + 1))"""
CELLS = (
    "%load_ext tpunb\nimport os",
    TRAIN,
    "print('goes', 'on')",
)


def check(path: Path) -> None:
    """Small, valid, free of widgets, and readable: in the file and as a web page."""
    assert path.stat().st_size < 100_000
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert "widgets" not in book.metadata
    train, below = [cell for cell in book.cells if cell.source in CELLS[1:]]
    shown = [out for out in train.outputs if out.output_type == "display_data"]
    assert all(set(out.data) <= {"text/html", "text/plain"} for out in shown)
    card, newest = shown
    assert "<b>succeeded</b>" in card.data["text/html"]
    assert card.data["text/plain"].startswith(f"succeeded · {RANKS} ranks · ")
    text = newest.data["text/plain"]
    told = re.match(r"… the newest of ([\d,]+) lines \(", text)
    assert told
    assert 0 <= int(told[1].replace(",", "")) - LINES * RANKS <= 2 * RANKS  # and tqdm's bars
    # Whoever ended last: the others' last lines may have made room for theirs.
    last = [f"[{rank}] rank {rank} step {LINES - 1} of many" for rank in range(RANKS)]
    assert set(last) & set(text.splitlines())
    streams = [out for out in train.outputs if out.output_type == "stream"]
    assert {out.name for out in streams} == {"stdout"}
    first = "".join(out.text for out in streams)
    assert "\r" not in first
    # The first lines, in order, however those of the ranks interleave.
    steps: dict[str, list[int]] = {}
    for rank, step in re.findall(r"^\[(\d)\] rank \1 step (\d+) of many$", first, re.MULTILINE):
        steps.setdefault(rank, []).append(int(step))
    assert any(seen[:2] == [0, 1] for seen in steps.values())
    assert all(seen == sorted(seen) for seen in steps.values())
    [value] = [out for out in train.outputs if out.output_type == "execute_result"]
    assert "RunResult succeeded" in value.data["text/plain"]
    assert "".join(out.text for out in below.outputs) == "goes on\n"

    page, _ = HTMLExporter(embed_images=True).from_notebook_node(book)
    assert "<b>succeeded</b>" in page
    assert any(line in page for line in last)
    assert "jupyter-widgets" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
