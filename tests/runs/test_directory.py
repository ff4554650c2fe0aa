from __future__ import annotations

from pathlib import Path

import pytest

from tpunb.errors import TpunbError
from tpunb.runs import directory
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import Block, RunSpec


def spec_of(run: RunDir, ranks: int = 2) -> RunSpec:
    blocks = (Block("header", 1, 1), Block("train", 2, 3, 0, 7))
    return RunSpec(run.id, "n", ranks, "CPU", "/", ("a", "b"), blocks, returns=("x",))


def test_a_run_folder_is_private_and_its_id_unique(tmp_path: Path) -> None:
    first, second = (directory.create_run(tmp_path / "runs", "my run/ü") for _ in range(2))
    assert first.id != second.id
    assert first.id.endswith("my-run-ü")
    assert first.path.stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TpunbError, match="--runs DIR"):
        directory.create_run(tmp_path / "file", "x")


def test_runs_are_found_by_any_part_of_their_id(tmp_path: Path) -> None:
    made = []
    for name in ("alpha", "beta", "beta2"):
        made.append(directory.create_run(tmp_path, name))
        made[-1].write_spec(spec_of(made[-1]))
    (tmp_path / "not-a-run").mkdir()
    assert [run.id for run in directory.list_runs(tmp_path)] == [run.id for run in made]
    assert directory.find_run(tmp_path, None).id == made[2].id
    assert directory.find_run(tmp_path, "alph").id == made[0].id
    assert directory.find_run(tmp_path, made[1].id).id == made[1].id
    with pytest.raises(TpunbError, match=r"several runs: .*beta, .*beta2"):
        directory.find_run(tmp_path, "beta")
    with pytest.raises(TpunbError, match=r"the latest are: .*alpha"):
        directory.find_run(tmp_path, "gamma")
    with pytest.raises(TpunbError, match="no runs"):
        directory.find_run(tmp_path / "none", None)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("odd")])
def test_a_run_that_cannot_be_started_leaves_no_folder(tmp_path: Path, error: Exception) -> None:
    expected = TpunbError if isinstance(error, OSError) else ValueError

    def start() -> None:
        with directory.new_run(tmp_path, "n") as run:
            run.script.write_text("half of it")
            raise error

    with pytest.raises(expected) as caught:
        start()
    assert list(tmp_path.iterdir()) == []
    if isinstance(error, OSError):
        assert "nothing was started: No space left on device in " in str(caught.value)
        assert "%tpu_setup --runs" in str(caught.value)
    with directory.new_run(tmp_path, "n") as run:
        run.script.touch()
    assert run.script.exists()
