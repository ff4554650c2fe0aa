"""A notebook that nobody watches, whose runs are copied to a bucket."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import v4

from tests.fakes.bucket import bucket


@pytest.mark.usefixtures("starts_processes")
def test_upload_of_a_run_to_a_bucket_is_complete_after_the_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket() as there:
        for name, value in there.env.items():
            monkeypatch.setenv(name, value)
        cells = [
            f"%load_ext tpunb\n%tpu_setup --no-warm --runs {there.url}",
            "%%tpu_train --cores 1\nimport tpunb\ntpunb.log(1, loss=0.5)\nprint('trained')",
            "%tpu_runs",
        ]
        notebook = v4.new_notebook(cells=[v4.new_code_cell(source) for source in cells])
        # The first writes fail: the run neither fails nor waits for it.
        there.trouble += ["fail", "fail", "slow"]
        client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}})
        client.execute()
        nbformat.validate(notebook)
        [run] = (tmp_path / "runs").iterdir()
        assert not (run / "upload.json").exists()
        assert there.writes[-1] == f"{run.name}/result.json"
        assert {f"{run.name}/{name}" for name in ("run.log", "metrics.jsonl", "spec.json")} <= {
            *there.writes
        }
