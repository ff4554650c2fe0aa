"""The appearance of the report."""

from __future__ import annotations

from tpunb.diagnostics.cell.report import MOST, DebugReport, Issue, describe_seconds


def finding(number: int) -> Issue:
    return Issue("read", f"value {number} < 3", f"cell [1], line {number}: a < b", "use `log`")


def test_it_fits_on_a_screen() -> None:
    shown = str(DebugReport([finding(n) for n in range(20)], ["20 steps of 3 ms"]))
    lines = shown.splitlines()
    assert len(lines) <= 24
    assert lines[0] == "%%tpu_debug: 20 issues found · 20 steps of 3 ms"
    assert lines[-1] == f"and {20 - MOST} less expensive issues: fix the ones above first"
    assert lines[1:4] == ["1. value 0 < 3", "   cell [1], line 0: a < b", "   → use `log`"]


def test_html_shows_the_same_and_is_escaped() -> None:
    html = DebugReport([finding(1)], ["1 < 2 steps"]).html()
    assert "1 &lt; 2 steps" in html
    assert "value 1 &lt; 3" in html
    assert "<code>a &lt; b</code>" in html
    assert "→ use <code>log</code>" in html


def test_a_report_without_findings() -> None:
    assert str(DebugReport([], ["3 steps"])) == "%%tpu_debug: no issues found · 3 steps"


def test_spans() -> None:
    assert [describe_seconds(s) for s in (0.00123, 0.05, 1.25, 600)] == [
        "1.2 ms",
        "50 ms",
        "1.2 s",
        "10 min",
    ]
