"""`tpunb.save` and `tpunb.load`: loaded state, locations, and refused checkpoints."""

from __future__ import annotations

import collections
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

import tpunb
from tests.drivers.ranks import Ranks, rehearse
from tpunb.errors import CheckpointError
from tpunb.runs import last_run
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunState
from tpunb.training.checkpoint import api
from tpunb.training.checkpoint.api import Checkpoint, load, save
from tpunb.training.checkpoint.store import LocalStore

pytestmark = pytest.mark.usefixtures("outside_run")


class Rank:
    """This process as one rank of a run after another."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = run
        self._patch = monkeypatch
        self._remembered: dict[tuple[int, int], dict[int, Any]] = {}

    def again(self, rank: int, attempt: int = 0, ranks: int = 2) -> None:
        """Return to the earlier process of this rank, with its record of saves."""
        self(rank, attempt, ranks)
        known = self._remembered.setdefault((rank, attempt), {})
        self._patch.setattr(api, "_processes", known)

    def __call__(self, rank: int, attempt: int = 0, ranks: int = 2) -> None:
        env = {
            "TPUNB_RUN": str(self.run),
            "TPUNB_ATTEMPT": str(attempt),
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
        }
        for name, value in env.items():
            self._patch.setenv(name, value)
        self._patch.setattr(api, "_processes", {})


@pytest.fixture
def as_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(tmp_path / "run", monkeypatch)


def loaded(**options: Any) -> Checkpoint:
    found = load(**options)
    assert found is not None
    return found


def files(folder: Path | str = "checkpoints") -> list[Path]:
    return sorted(Path(folder).iterdir())


class Config:
    """A class of a notebook, which is more than data."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.width == other.width

    __hash__ = None  # type: ignore[assignment]


def test_load_without_a_checkpoint_returns_none() -> None:
    assert load() is None
    assert not Path("checkpoints").exists()


def test_saved_values_of_all_types_are_loaded() -> None:
    state = {
        "bf16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "nested": [(1, 2.5, "text", None, True), {3: b"bytes"}, {1, 2}],
        "ordered": collections.OrderedDict(a=1),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(0.25),
        "words": np.array(["a", "bc"]),
        "random": torch.get_rng_state(),
        "numpy_random": np.random.get_state(),
    }
    save(state, 7)
    found = loaded()
    assert (found.step, found.path) == (7, str(files()[0].absolute()))
    back = found.state
    assert list(back) == list(state)
    for name in ("bf16", "bool", "complex", "float8", "empty", "random"):
        tensor: Any = state[name]
        assert back[name].dtype == tensor.dtype
        assert back[name].tolist() == tensor.tolist()
    for name in ("nested", "ordered", "scalar"):
        assert back[name] == state[name]
    for name in ("array", "words"):
        assert back[name].dtype == state[name].dtype  # type: ignore[attr-defined]
        assert (back[name] == state[name]).all()
    assert (back["numpy_random"][1] == state["numpy_random"][1]).all()  # type: ignore[index]


def test_checkpoint_unpacks_into_state_and_step() -> None:
    save({"x": 1}, 3)
    state, step = loaded()
    assert (state, step) == ({"x": 1}, 3)
    assert repr(loaded()).startswith("Checkpoint(step=3, path=")


def test_plain_torch_reads_the_file() -> None:
    save({"x": torch.ones(3)}, 3)
    assert torch.equal(torch.load(files()[0])["x"], torch.ones(3))
    assert torch.equal(torch.load(files()[0], mmap=True)["x"], torch.ones(3))


def test_save_keeps_the_last_three() -> None:
    for step in (10, 20, 30, 40, 50):
        save({"x": step}, step)
    names = [path.name.partition("-step-") for path in files()]
    assert [(number, rest[:2]) for number, _, rest in names] == [
        ("000003", "30"),
        ("000004", "40"),
        ("000005", "50"),
    ]
    assert [loaded(step=step)["x"] for step in (30, 40, 50)] == [30, 40, 50]


def test_the_newest_is_the_one_saved_last() -> None:
    save("long training", 1000)
    save("begun anew", 10)
    assert loaded().state == "begun anew"
    save("the same step again", 10)
    assert loaded().state == loaded(step=10).state == "the same step again"


def test_load_of_a_missing_step_is_an_error() -> None:
    save("x", 10)
    missing = r"no complete checkpoint of step 11 in .*checkpoints"
    with pytest.raises(CheckpointError, match=missing):
        load(step=11)


@pytest.mark.parametrize(
    ("step", "kind", "said"),
    [
        (1.5, TypeError, "must be an int, not float"),
        ("3", TypeError, "must be an int, not str"),
        (torch.tensor(3), TypeError, "must be an int, not Tensor"),
        (-1, ValueError, "must not be negative: -1"),
    ],
)
def test_save_of_invalid_steps_is_refused(step: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        save({}, step)
    assert not Path("checkpoints").exists()
    save({}, np.int64(3))  # type: ignore[arg-type]
    assert loaded().step == 3


class TestPlaces:
    def test_checkpoint_folder_by_path_or_variable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_rank: Rank
    ) -> None:
        save("here", 1, path=tmp_path / "deep" / "er")
        assert loaded(path=str(tmp_path / "deep" / "er")).state == "here"
        assert load() is None
        monkeypatch.setenv("TPUNB_CHECKPOINTS", str(tmp_path / "named"))
        as_rank(0)
        save("named", 2)
        assert loaded().path.startswith(str(tmp_path / "named"))

    def test_load_from_a_run_folder(
        self, as_rank: Rank, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        as_rank(0)
        save("in the run", 1)
        (as_rank.run / "spec.json").touch()
        monkeypatch.delenv("TPUNB_RUN")
        assert loaded(path=as_rank.run).state == "in the run"
        result = RunResult(RunState.SUCCEEDED, "x", 1, "CPU", 0.0, 1.0, as_rank.run)
        monkeypatch.setattr(last_run, "result", result)
        assert load() is None
        assert (
            "/checkpoints; the last run's: tpunb.load(tpunb.last_run.dir)" in capfd.readouterr().err
        )

    def test_checkpoint_save_and_load_at_a_url(self, capsys: pytest.CaptureFixture[str]) -> None:
        url = "memory://bucket/run/"
        assert load(url) is None
        for step in range(5):
            save({"x": torch.full((1000,), step)}, step, path=url)
        found = loaded(path=url)
        assert found["x"][0] == 4
        assert found.path.startswith("memory://bucket/run/000005-step-4-")
        names = fsspec.filesystem("memory").ls("/bucket/run", detail=False)
        assert len(names) == 3
        memory = fsspec.filesystem("memory")
        newest = max(names)
        memory.pipe_file(newest, memory.cat_file(newest)[:-1])
        assert loaded(path=url).step == 3
        assert "step 4 is cut off or changed" in capsys.readouterr().err
        memory.rm("/bucket", recursive=True)

    def test_a_failed_upload_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        save("first", 1, path="memory://broken")
        system = fsspec.filesystem("memory")

        def fail(*args: object, **options: object) -> None:
            raise OSError(5, "the network is down")

        from fsspec.implementations.memory import MemoryFile

        monkeypatch.setattr(MemoryFile, "write", fail)
        said = r"cannot write to memory://broken: the network is down.*earlier checkpoints are inta"
        with pytest.raises(CheckpointError, match=said):
            save("second", 2, path="memory://broken")
        assert len(system.ls("/broken")) == 1
        assert loaded(path="memory://broken").state == "first"
        monkeypatch.undo()
        for name, age in (("0" * 32, 2), ("1" * 32, 0)):  # of saves that were killed
            system.pipe_file(f"/broken/{name}.tmp", b"x")
            system.store[f"/broken/{name}.tmp"].modified -= timedelta(hours=age)
        save("third", 3, path="memory://broken")
        names = [path.rpartition("/")[2] for path in system.ls("/broken", detail=False)]
        assert [name for name in names if name.endswith(".tmp")] == [f"{'1' * 32}.tmp"]
        system.rm("/broken", recursive=True)

    def test_a_file_url_is_a_folder(self, tmp_path: Path) -> None:
        save("x", 1, path=f"file://{tmp_path}/urls")
        assert loaded(path=tmp_path / "urls").state == "x"

    def test_checkpoint_url_of_an_unknown_kind_is_an_error(self) -> None:
        with pytest.raises(CheckpointError, match=r"nonsense://x: .*nonsense"):
            save("x", 1, path="nonsense://x")
        with pytest.raises(CheckpointError, match=r"nonsense://x: .*nonsense"):
            load("nonsense://x")

    def test_resume_variable_selects_the_checkpoints(
        self,
        as_rank: Rank,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        save("of the run before", 30, path=tmp_path / "before")
        monkeypatch.setenv("TPUNB_RESUME", str(tmp_path / "before"))
        as_rank(0)
        assert loaded().state == "of the run before"
        save("of this run", 31)
        assert loaded().state == "of this run"
        assert capsys.readouterr().err == ""

        monkeypatch.setenv("TPUNB_RESUME", str(tmp_path / "nowhere"))
        monkeypatch.setenv("TPUNB_RUN", str(tmp_path / "another"))
        assert load() is None
        assert "no complete checkpoint in TPUNB_RESUME=" in capsys.readouterr().err


class TestRanks:
    def test_rank_0_saves_for_all_ranks(self, as_rank: Rank) -> None:
        as_rank(1)
        save("of rank 1", 1)
        assert not as_rank.run.exists()
        as_rank(0)
        save("of rank 0", 1)
        for rank in (0, 1):
            as_rank(rank, attempt=1)
            assert loaded().state == "of rank 0"

    def test_a_late_rank_resumes_from_the_same_step(self, as_rank: Rank) -> None:
        as_rank(0)
        save("of the first attempt", 1)
        as_rank(0, attempt=1)
        assert loaded().step == 1
        save("quick", 2)
        assert loaded().step == 2
        as_rank(1, attempt=1)
        assert loaded().step == 1  # and not 2
        assert loaded(step=2).state == "quick"
        save("nothing, in rank 1", 2)
        assert loaded().step == 2

    def test_checkpoint_an_attempt_resumed_from_is_kept_for_late_ranks(self, as_rank: Rank) -> None:
        for attempt in range(3):
            as_rank(0, attempt)
            for step in range(attempt * 10, attempt * 10 + 6):
                save(step, step)
            steps = sorted(one.step for one in api._list(LocalStore(as_rank.run / "checkpoints")))
            began = attempt * 10 - 5
            assert steps == ([began] if attempt else []) + [began + 8, began + 9, began + 10]
            as_rank(1, attempt)
            found = load()
            assert (found.step if found else None) == (began if attempt else None)

    def test_checkpoints_under_torchrun_on_several_hosts_are_found(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A later run may have the same variables, and must find the first run's checkpoints."""
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        save("x", 1)
        monkeypatch.setattr(api, "_processes", {})
        assert loaded().state == "x"

    def test_per_rank_save_loads_the_newest_complete_step(
        self, as_rank: Rank, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for step in (10, 20):
            for rank in (0, 1):
                as_rank(rank)
                save(f"{step} of {rank}", step, per_rank=True)
        as_rank(1)
        save("30 of 1", 30, per_rank=True)  # and rank 0 crashes
        for rank in (0, 1):
            as_rank(rank, attempt=1)
            assert loaded().state == f"20 of {rank}"
            assert "step 30 is missing the part of rank 0: using step 20" in capsys.readouterr().err

        # The next attempt comes to step 30 as well: parts of two attempts are not one.
        save("30 of 1, again", 30, per_rank=True)
        as_rank(0, attempt=2)
        assert loaded().step == 20
        assert capsys.readouterr().err.count("step 30 is missing the part of rank 0") == 2
        as_rank(0, attempt=1)
        save("30 of 0", 30, per_rank=True)
        for rank, state in enumerate(["30 of 0", "30 of 1, again"]):
            as_rank(rank, attempt=2)
            assert loaded().state == state

    @pytest.mark.parametrize("seed", range(4))
    def test_load_finds_the_newest_complete_one_in_any_order_of_ranks(
        self, as_rank: Rank, seed: int
    ) -> None:
        """Alternate plain and `per_rank` saves, by three ranks at different speeds."""
        random = Random(seed)
        kinds = random.choices((True, False), k=12)
        done = [0, 0, 0]
        while min(done) < len(kinds):
            rank = random.choices(range(3), weights=[9, 3, 1] if seed % 2 else [1, 3, 9])[0]
            if done[rank] == len(kinds):
                continue
            as_rank.again(rank, ranks=3)
            save(rank, done[rank], per_rank=kinds[done[rank]])
            done[rank] += 1
            whole = [
                step
                for step, per_rank in enumerate(kinds)
                if step < (min(done) if per_rank else done[0])
            ]
            as_rank(0, attempt=1, ranks=3)
            found = load()
            assert (found.step if found else None) == (whole[-1] if whole else None)
        kept = api._list(LocalStore(as_rank.run / "checkpoints"))
        assert [one.step for one in kept if not one.missing] == [11, 10, 9]

    def test_incomplete_per_rank_checkpoint_is_removed_in_the_next_attempt(
        self, as_rank: Rank, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for step in range(5):
            as_rank.again(0)
            save("of 0", step, per_rank=True)  # and rank 1 is killed
        as_rank(0, attempt=1)
        assert load() is None
        assert "the part of rank 1; and 2 more: no older one" in capsys.readouterr().err
        for step in range(1, 5):
            for rank in (0, 1):
                as_rank.again(rank, attempt=1)
                save("x", step, per_rank=True)
        stored = api._list(LocalStore(as_rank.run / "checkpoints"))
        assert [one.step for one in stored] == [4, 3, 2]

    def test_corrupt_per_rank_part_is_skipped_by_every_rank(self, as_rank: Rank) -> None:
        for step in (10, 20):
            for rank in (0, 1):
                as_rank(rank)
                save(step, step, per_rank=True)
        (part,) = (as_rank.run / "checkpoints").glob("*-step-20-*-rank-1-of-2-*.pt")
        part.write_bytes(part.read_bytes()[:-100])
        for rank in (0, 1):
            as_rank(rank, attempt=1)
            assert loaded().step == 10

    def test_load_with_another_number_of_ranks(self, as_rank: Rank) -> None:
        for rank in (0, 1):
            as_rank(rank)
            save(rank, 5, per_rank=True)
        as_rank(0, attempt=1, ranks=4)
        with pytest.raises(
            CheckpointError, match="a part from each of 2 ranks, and this run has 4"
        ):
            load()
        assert loaded(rank=1).state == 1
        with pytest.raises(CheckpointError, match="parts of ranks 0 to 1, not 2"):
            load(rank=2)

    def test_torchrun_attempts_are_distinguished(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "2")
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        groups = [api._group()]
        assert groups == [api._group()]
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        groups.append(api._group())
        monkeypatch.setattr(os, "getppid", lambda: os.getpid())  # another torchrun
        groups.append(api._group())
        assert len(set(groups)) == 3

    def test_hosts_of_a_run_share_an_attempt_wherever_their_folders_are(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in {
            "TPUNB_ADDRESS": "10.0.0.3",
            "MASTER_ADDR": "10.0.0.2",
            "TPUNB_ATTEMPT": "0",
        }.items():
            monkeypatch.setenv(name, value)
        groups = []
        for run, port in (("/home/a/runs/1", "4000"), ("/b/runs/1", "4000"), ("/b/1", "4001")):
            monkeypatch.setenv("TPUNB_RUN", run)
            monkeypatch.setenv("MASTER_PORT", port)
            groups.append(api._group())
        assert groups[0] == groups[1] != groups[2]


class TestTrust:
    def test_load_of_classes_needs_weights_only_false(self) -> None:
        save({"config": Config(3)}, 1)
        said = r"more than data: rebuilding .*Config can run code.*load\(weights_only=False\)"
        with pytest.raises(CheckpointError, match=said):
            load()
        assert loaded(weights_only=False)["config"] == Config(3)

    def test_load_from_a_url_does_not_run_code(self, tmp_path: Path) -> None:
        class Evil:
            def __reduce__(self) -> Any:
                return os.system, (f"touch {tmp_path}/ran",)

        save(Evil(), 1, path="memory://evil")
        with pytest.raises(CheckpointError, match=r"posix.system can run code"):
            load("memory://evil")
        assert not (tmp_path / "ran").exists()
        fsspec.filesystem("memory").rm("/evil", recursive=True)

    def test_run_trusts_classes_in_its_own_checkpoints(self, as_rank: Rank) -> None:
        as_rank(0)
        save({"config": Config(3)}, 1)
        as_rank(1, attempt=1)
        assert loaded()["config"] == Config(3)
        with pytest.raises(CheckpointError, match="more than data"):
            load(as_rank.run / "checkpoints", step=1)


class TestErrors:
    def test_save_of_what_cannot_be_pickled(self) -> None:
        save("first", 1)
        state = {"model": {"w": torch.ones(2)}, "hooks": [1, {"on_end": threading.Lock()}]}
        said = (
            r"cannot write to .*/checkpoints: TypeError: cannot pickle '_thread.lock' object\. "
            r"Step 2 is not saved; earlier checkpoints are intact$"
        )
        with pytest.raises(CheckpointError, match=said):
            save(state, 2)
        assert loaded().state == "first"
        assert len(files()) == 1

    def test_what_is_free_on_the_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert LocalStore(tmp_path).describe_free().endswith("B is free")
        full = SimpleNamespace(f_files=100, f_favail=0, f_bavail=9, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda path: full)
        assert LocalStore(tmp_path).describe_free().startswith("no inode is free")

    def test_checkpoint_path_that_is_not_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(
            CheckpointError, match=r"cannot write to .*file/below: Not a directory.*path=…"
        ):
            save("x", 1, path=tmp_path / "file" / "below")
        with pytest.raises(CheckpointError, match=r"cannot read .*below.*Not a directory"):
            load(tmp_path / "file" / "below")

    def test_what_is_no_file_is_not_loaded_under_the_name_of_the_newest(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save("good", 1)
        folder = files()[0].parent
        os.mkfifo(folder / "000007-step-7-00000000-1234abcd.pt")
        (folder / "000008-step-8-00000000-1234abcd.pt").mkdir()
        (folder / "000009-step-9-00000000-1234abcd.pt").symlink_to(folder / "gone")
        assert loaded().state == "good"
        assert "step 9 is cut off or changed" in capsys.readouterr().err
        for step in range(2, 6):
            save("better", step)
        assert loaded().step == 5
        assert capsys.readouterr().err == ""


def _train_and_save(run: str) -> tuple[int, list[float], bool]:
    import torch_xla
    import torch_xla.core.xla_model as xm

    rank, _ = rehearse()
    os.environ["TPUNB_RUN"] = run
    device = torch_xla.device()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3, bias=False).to(device)
    tied = torch.nn.Linear(3, 3, bias=False)
    tied.weight = model.weight
    both = torch.nn.ModuleDict({"a": model, "b": tied})
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        both["b"](model(torch.ones(2, 3, device=device) * rank)).sum().backward()
        xm.optimizer_step(optimizer)
    state = {
        "model": both.state_dict(),
        "optimizer": optimizer.state_dict(),
        "half": torch.full((2,), 0.5, dtype=torch.bfloat16, device=device),
        "view": (torch.arange(6, device=device) * 2)[2:4],
        "parameter": model.weight,
        "object": Config(torch.ones(2, device=device)),  # type: ignore[arg-type]
    }
    tpunb.save(state, 2)
    back = tpunb.load()
    if back is not None:  # rank 1 may be here before rank 0 has written
        found = back.state
        assert {t.device.type for t in found["model"].values()} == {"cpu"}
        assert found["model"]["a.weight"].data_ptr() == found["model"]["b.weight"].data_ptr()
        assert isinstance(found["parameter"], torch.nn.Parameter)
        assert found["parameter"].requires_grad
        assert found["half"].dtype == torch.bfloat16
        assert found["view"].tolist() == [4, 6]
        assert found["object"].width.tolist() == [1, 1]
        assert found["optimizer"]["state"][0]["exp_avg"].device.type == "cpu"
        assert torch.equal(found["model"]["a.weight"], model.weight.detach().cpu())
    return rank, model.weight.detach().cpu().flatten().tolist(), back is not None


def test_tensors_of_xla_devices(ranks: Ranks, tmp_path: Path) -> None:
    values = ranks.values(_train_and_save, 2, str(tmp_path / "run"))
    assert [rank for rank, _, _ in values] == [0, 1]
    assert values[0][1] == values[1][1]
    assert values[0][2]
    assert len(files(tmp_path / "run" / "checkpoints")) == 1


def _save_on_a_stop(run: str) -> tuple[float, float, int]:
    import torch_xla
    import torch_xla.debug.metrics as metrics

    os.environ.update(TPUNB_RUN=run)
    device = torch_xla.device()
    weight = torch.ones(3, device=device)
    torch_xla.sync()
    unfinished = weight * 2 + 1
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        tpunb.save({"weight": weight}, 1)
    during = metrics.counter_value("UncachedCompile") or 0
    tpunb.save({"weight": weight}, 2)
    after = metrics.counter_value("UncachedCompile") or 0
    return during, after, int(unfinished[0].item())


def test_save_on_a_stop_computes_only_pending_values(ranks: Ranks, tmp_path: Path) -> None:
    ((during, after, value),) = ranks.values(_save_on_a_stop, 1, str(tmp_path / "run"))
    assert after == during + 1  # the pending step, which all ranks start in the same way
    assert value == 3


class _Full:
    """A stream on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_load_works_if_standard_error_is_full(
    outside_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"n": 1}, 1)
    save({"n": 2}, 2)
    newest = sorted((outside_run / "checkpoints").glob("*.pt"))[-1]
    newest.write_bytes(newest.read_bytes()[:-10])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", _Full())
        found = load()
    assert found is not None
    assert found.step == 1
