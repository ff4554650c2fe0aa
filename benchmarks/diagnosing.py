"""How many failures are diagnosed correctly, and how many harmless logs get a cause.

Users' reports are read from `shared/failures/` next to the repository, if it exists; without
them, only logs that have no known cause are diagnosed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.table import table
from tpunb.diagnostics.failure import diagnose

ROOT = Path(__file__).parents[1]
REPORTS = ROOT.parent / "shared" / "failures"
HARMLESS = ROOT / "tests" / "diagnostics" / "failure" / "harmless.log"
PLAIN = ROOT / "tests" / "diagnostics" / "failure" / "plain_errors.yaml"
OF_FAMILY = {
    "vm-image-wrong": {"topology-env-wrong"},
    "tpu-not-attached": {"tpu-not-found"},
    "kaggle-push-image": {"torch-xla-missing"},
    "api-too-new": {"api-removed"},
    "torchvision-mismatch": {"torch-companions"},
    "torchtpu-install": {"torchtpu-release"},
    "fork-cuda": {"cuda-fork"},
    "checkpoint-corrupt": {"file-damaged"},
    "api-torch-xla-attr": {"torch-checkpoint"},
    "device-mismatch-cuda": {"device-mismatch"},
}
"""Rules that explain a family of reports but have another name, by family."""
PARTLY = {
    "host-oom": {"process-killed"},
    "child-exit-17": {"rendezvous-lost-peer"},
    "proxy-in-the-way": {"rendezvous-lost-peer"},
}
"""Rules that explain a part of a family, by family."""
ENDS = (
    "Traceback (most recent call last):\n"
    '  File "train.py", line 31, in <module>\n'
    "    {code}\n"
    "{error}\n"
)
BELOW = {"KeyError": "KeyError: 'lr'", "ValueError": "ValueError: too many values to unpack"}


def measure(folder: Path, rounds: int) -> str:
    """Diagnose everything once and count the answers; both arguments are unused."""
    rows = [["diagnosing", "right", "partly", "wrong", "silent"]]
    if REPORTS.exists():
        reports = [report for report in _load("failures.json") if report["log_usable"]]
        rows.append([f"{len(reports)} reports of users", *map(str, count(reports).values())])
    logs = list(harmless())
    blamed = {name: found[0].id for name, log, code in logs if (found := diagnose(log, code))}
    wrong = str(len(blamed))
    rows.append(
        [f"{len(logs)} plain errors, harmless logs", "", "", wrong, str(len(logs) - len(blamed))]
    )
    return "\n".join([table(rows), *(f"{name}: {cause}" for name, cause in blamed.items())])


def count(reports: list[dict[str, Any]]) -> dict[str, int]:
    """Count the reports diagnosed right, partly (in part, or not first), wrong, not at all."""
    counts = dict.fromkeys(("right", "partly", "wrong", "silent"), 0)
    for report in reports:
        counts[
            judge(report["family"], [diagnosis.id for diagnosis in diagnose(report["symptom"])])
        ] += 1
    return counts


def judge(family: str, answers: list[str]) -> str:
    right = OF_FAMILY.get(family, {family})
    if not answers:
        return "silent"
    if answers[0] in right:
        return "right"
    return "partly" if {*answers} & (right | PARTLY.get(family, set())) else "wrong"


def harmless() -> Iterator[tuple[str, str, int | None]]:
    """Logs without a known cause: name, text, return code."""
    reports = _load("harmless.json") if REPORTS.exists() else []
    lines = HARMLESS.read_text(encoding="utf-8").splitlines()
    reports += [{"id": f"line {n}", "symptom": line} for n, line in enumerate(lines, start=1)]
    errors: list[str] = yaml.safe_load(PLAIN.read_text(encoding="utf-8"))
    for error in errors:
        yield error[:60], ENDS.format(code="train()", error=error), 1
        yield f"{error[:60]} (last line only)", f"step 1\n{error}\n", 1
    for report in reports:
        for name, error in BELOW.items():
            end = ENDS.format(code="rate = config['lr']", error=error)
            yield f"{report['id']} above {name}", f"{report['symptom']}\n{end}", 1
            yield f"{report['id']} below {name}", f"{end}{report['symptom']}\n", 1
            yield f"{report['id']} above a bare {name}", f"{report['symptom']}\n{error}\n", 1
        yield f"{report['id']} alone, status 1", report["symptom"], 1


def _load(name: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads((REPORTS / name).read_text(encoding="utf-8"))
    return records
