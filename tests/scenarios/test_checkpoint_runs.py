"""Checkpoints in runs: ranks save, a stopped one too, and a later run goes on."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.support import Driver
from tpunb.runs.events import Output, Resumed
from tpunb.runs.spec import Stop

ROOT = Path(__file__).parents[2]
PRELUDE = """
import os, time, torch, torch_xla, tpunb
rank = int(os.environ["RANK"]) if "RANK" in os.environ else None
class Settings:
    pass
"""
TRAIN = """
rank = int(os.environ["RANK"])
checkpoint = tpunb.load()
start, weight = 0, torch.zeros(2, device=torch_xla.device())
if checkpoint:
    start, weight = checkpoint.step + 1, checkpoint["weight"].to(weight.device)
print("starts at", start, weight.tolist())
for step in range(start, start + 4):
    weight = weight + 1
    tpunb.save({"weight": weight, "settings": Settings()}, step)
    tpunb.save({"rank": rank}, step, per_rank=True, path="parts")
"""
STOPPED = """
rank = int(os.environ["RANK"])
try:
    print(f"rank {rank} is ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    tpunb.save({"rank": rank}, 7)
    raise
"""


def test_resume_in_a_later_run_and_save_on_a_stop(driver: Driver, tmp_path: Path) -> None:
    first = driver.run([PRELUDE], TRAIN, cwd=str(tmp_path))
    assert first.result.state == "succeeded", first.log
    assert len([line for line in first.log if "starts at 0 [0.0, 0.0]" in line]) == 2
    saved = first.result.dir / "checkpoints"
    assert sorted(path.name.split("-")[2] for path in saved.iterdir()) == ["1", "2", "3"]
    assert len(list((tmp_path / "parts").iterdir())) == 2 * 3

    # Another run must not rebuild its class without being told to.
    resume = {"TPUNB_RESUME": str(saved)}
    later = driver.run([PRELUDE], TRAIN, cwd=str(tmp_path), env=resume)
    assert later.result.state == "failed"
    assert re.search(
        r"CheckpointError.*__main__.Settings.*weights_only=False", "\n".join(later.log)
    )
    trusting = TRAIN.replace("tpunb.load()", "tpunb.load(weights_only=False)")
    later = driver.run([PRELUDE], trusting, cwd=str(tmp_path), env=resume)
    assert later.result.state == "succeeded", later.log
    assert len([line for line in later.log if "starts at 4 [4.0, 4.0]" in line]) == 2
    assert [event.step for event in later.events if isinstance(event, Resumed)] == [3]
    steps = {path.name.split("-")[2] for path in (later.result.dir / "checkpoints").iterdir()}
    assert steps == {"5", "6", "7"}

    stopped = driver.run(
        [PRELUDE],
        STOPPED,
        when=lambda event: isinstance(event, Output) and "rank 0 is ready" in event.text,
        then=lambda run: run.stop(Stop(reason="the test stopped it")),
    )
    assert stopped.result.state == "interrupted"
    (left,) = (stopped.result.dir / "checkpoints").iterdir()
    assert re.fullmatch(r"000001-step-7-\w{8}-\w{8}\.pt", left.name)


def test_checkpoint_docs_examples_run_and_resume(outside_run: Path) -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for _ in range(2):  # the second time it resumes
        for block in blocks:
            exec(block, names)
    assert names["start"] == 10
    assert len(os.listdir("checkpoints")) == 3
