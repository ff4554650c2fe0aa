from __future__ import annotations

import html
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.fakes.dumps import DUMPS
from tests.machine.machines import PAIR, TORCH_TPU, look, machine
from tpunb.display import doctor_report
from tpunb.machine.doctor import SetupReport
from tpunb.machine.problem import SetupProblem
from tpunb.runs.spec import BackendName
from tpunb.utils.install_commands import UV_INSTALL

pytestmark = pytest.mark.usefixtures("starts_processes")


def found(name: str, folder: Path, **changes: str) -> SetupReport:
    with machine(name, folder) as made:
        return look(made, PAIR | changes)


class Words(HTMLParser):
    """Collects the visible text of HTML and the styles that are used."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert {name for name, _ in attrs} <= {"style"}
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize("name", DUMPS)
def test_the_card_and_its_text_say_the_same(name: str, tmp_path: Path) -> None:
    report = found(name, tmp_path, torch="2.15.0")
    own = [("kernel", "uses XLA on CPU, so runs can take the TPU")]
    read = Words(doctor_report.report_card(report, own))
    assert read.open == []
    assert read.tags <= {"div", "span", "b", "br", "code"}
    said = re.sub(r"\s+|`", "", "".join(read.words))
    for line in doctor_report.report_text(report, own).splitlines():
        assert re.sub(r"\s+|`", "", line) in said


def test_a_requested_tpu_that_is_missing(tmp_path: Path) -> None:
    report = found("v5e-8", tmp_path)
    nothing = replace(report, machine=replace(report.machine, chips=0))
    text = doctor_report.report_text(nothing)
    assert "no TPU, although PJRT_DEVICE=TPU is set: nothing can run" in text
    assert "0 TPU" not in text.split("device", 1)[1]


def test_doctor_report_of_a_ready_tpu(tmp_path: Path) -> None:
    report = found("v5e-8", tmp_path)
    text = doctor_report.report_text(report)
    first, *rows = text.splitlines()
    assert first == "Ready: 8 cores on 8 TPU v5e chips"
    assert rows[0].split("  ")[-1] == "Google Cloud TPU VM"
    assert "v5litepod-8 · 8 chips on this host · 16 GiB HBM a chip · spot: may be preempted" in text
    assert re.search(r"^price +v5litepod-8 in us-central1, spot: \$1\.96 an hour", text, re.M)
    assert doctor_report.report_card(report).startswith('<div style="border-left:3px solid #2da44e')


@pytest.mark.parametrize(
    ("name", "packages", "backend", "rows"),
    [
        (
            "v6e-8",
            TORCH_TPU,
            "torchtpu",
            [
                "Ready: 8 cores on 8 TPU v6e chips",
                "backend   torchtpu (because it is)",
                "cores     1, 4 or 8 on this host",
            ],
        ),
        (
            "laptop",
            {"torch": "2.13.0"},
            "torchtpu",
            ["backend   torchtpu (because it is)", "rehearsal cores on"],
        ),
        ("v6e-8", {"torch": "2.13.0"}, "torch", ["not used (backend torch): "]),
        ("v5e-8", PAIR, "xla", ["backend   xla (because it is)", "1 or 8 on"]),
    ],
)
def test_the_backend_and_its_reason(
    name: str, packages: dict[str, str], backend: BackendName, rows: list[str], tmp_path: Path
) -> None:
    with machine(name, tmp_path) as made:
        report = look(made, packages, backend=backend, why="it is")
    lines = [re.sub(" {2,}", " ", line) for line in doctor_report.report_text(report).splitlines()]
    for row in rows:
        assert any(re.sub(" {2,}", " ", row) in line for line in lines), row
    told = report.to_json()
    assert (told["backend"], told["backend_reason"]) == (backend, "it is")


def test_gpus_are_the_device_of_the_backend_torch(tmp_path: Path) -> None:
    with machine("colab-gpu", tmp_path) as made:
        report = look(made, {"torch": "2.13.0"}, backend="torch")
    on_gpus = replace(report, machine=replace(report.machine, device="GPU", gpus=2), cores=2)
    text = doctor_report.report_text(on_gpus)
    assert text.startswith("Ready: 2 GPUs\n")
    assert re.search("^device +2 GPUs$", text, re.M)
    assert doctor_report.report_text(replace(on_gpus, cores=1)).startswith("Ready: 1 GPU of 2\n")


def test_issues_come_first_with_their_fixes(tmp_path: Path) -> None:
    with machine("v5e-16", tmp_path) as made:
        report = look(made, PAIR | {"torch": "2.15.0"})
    lines = doctor_report.report_text(report).splitlines()
    assert lines[0] == "2 issues found, the first:"
    assert lines[1] == f"  {report.problems[0].message}"
    assert lines[2] == f"  → {report.problems[0].fix}"
    assert lines[4] == f"also: {report.problems[1].message}"
    card = doctor_report.report_card(report)
    assert card.startswith('<div style="border-left:3px solid #e5534b')
    assert "--torch-backend=cpu torch==2.9.0 &#x27;torch_xla[tpu]==2.9.0&#x27;</code>" in card
    assert f"<code>{html.escape(UV_INSTALL)}" in card
    one = replace(report, problems=report.problems[:1])
    assert doctor_report.report_text(one).startswith("1 issue found:\n")


def test_values_of_the_machine_are_escaped(tmp_path: Path) -> None:
    report = found("laptop", tmp_path)
    problem = SetupProblem("x", "<script>alert(1)</script>", "`a` b`c")
    card = doctor_report.report_card(replace(report, problems=(problem,)))
    assert "<script>" not in card
    assert "<code>a</code> b`c" in card
