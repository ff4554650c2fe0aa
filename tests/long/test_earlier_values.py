"""More of tests/notebook/convert/test_earlier_values.py, which takes longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook.convert.notebooks import notebook, run
from tests.notebook.convert.test_earlier_values import ALONE
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.models import LeftOut


@pytest.mark.usefixtures("starts_processes")
def test_attaching_in_a_script_by_itself(tmp_path: Path) -> None:
    cells = ("%%tpu_train --detach --returns a\na = 1", "%tpu_attach --out r one\nprint(a)")
    script = convert(
        notebook(*cells, "q = %tpu_attach one", "%%tpu_train\nprint(r is q, r.returns)")
    )
    assert run(script, tmp_path, tpunb=True).stdout == "1\nTrue {'a': 1}\n"


@pytest.mark.usefixtures("starts_processes")
def test_a_script_by_itself_runs_it_in_its_place(tmp_path: Path) -> None:
    script = convert(
        notebook(
            ALONE,
            "%%tpu_train --returns layer,drawn --out r\n"
            "drawn = [random.random(), torch.rand(1).item()]\nlayer['tied'].data += 1",
            "print(drawn == [random.random(), torch.rand(1).item()])",
            "same = layer['tied'] is layer['again']\n"
            "print(same, layer['tied'] is weight, *layer['tied'].tolist())",
            "print(r.state, r.returns['layer'] is layer, r.wait() is r.result)",
            "tpunb.last_run.metrics()",
            "table = r.metrics()\nlow = 1",
            "table.tail()",
            "r.plot()\nprint(low)",
            "%%tpu_train\nprint('end')",
        )
    )
    done = run(script, tmp_path, tpunb=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "True",
        "True False 1.0 1.0",
        "succeeded True True",
        "1",
        "end",
    ]
    left_out = [(omission.cell, omission.reason) for omission in script.omissions]
    assert left_out == [(number, LeftOut.RUN_FOLDER) for number in (6, 7, 8, 9)]
