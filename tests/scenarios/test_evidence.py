"""What a run keeps of how a rank died."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import Driver
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note
from tpunb.runs.metrics import read_rows
from tpunb.runs.result import Summary
from tpunb.utils import files, memory

CGROUP = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup (version 1) of 300 MB."""
    group = CGROUP / f"tpunb-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(300 * 2**20))
    except OSError as error:
        pytest.skip(f"memory cgroups cannot be made here: {error}")
    yield group
    group.rmdir()


def test_crash_of_a_rank_killed_by_the_oom_killer(driver: Driver, small_group: Path) -> None:
    train = f"""
        import os
        if os.environ["RANK"] == "1":
            open("{small_group}/cgroup.procs", "w").write(str(os.getpid()))
            print("eats", flush=True)
            eaten = [bytearray(2**20) for _ in range(2000)]
    """
    seen = driver.run([], train)
    failure = seen.result.failure
    assert failure is not None
    assert (failure.rank, failure.signal) == (1, "SIGKILL")
    assert failure.message.startswith("was killed because memory ran out (it held ")
    assert "Killed process" in failure.message or "since the run began" in failure.message
    assert "[1] eats" in seen.log
    assert 100e6 < seen.result.peak_memory[1] < 2e9


def test_crash_of_a_rank_killed_by_an_unknown_sender(driver: Driver) -> None:
    seen = driver.run([], "import os\nos.kill(os.getpid(), 9)", ranks=1)
    failure = seen.result.failure
    assert failure is not None
    assert failure.message.startswith("was killed with SIGKILL by an unknown sender")
    assert "MB of " in failure.message or "GB of " in failure.message


def test_memory_peak_of_every_rank_is_in_the_result(driver: Driver) -> None:
    seen = driver.run(
        [], "import os\nx = b'1' * (400_000_000 if os.environ['RANK'] == '1' else 1)", ranks=2
    )
    assert seen.result.state == "succeeded"
    small, large = seen.result.peak_memory
    assert large - small > 300e6
    kept = type(seen.result).from_json(seen.result.to_json(), seen.result.dir)
    assert kept.peak_memory == seen.result.peak_memory


@pytest.mark.parametrize(
    ("dies", "said"),
    [
        (
            "os.write(2, b'F0101 12:00:00.1 7 tpu.cc:5] Check failed: ok (0 vs. 1)\\nmore\\n')\n"
            "os.abort()",
            "crashed with SIGABRT (native code aborted): "
            "F0101 12:00:00.1 7 tpu.cc:5] Check failed: ok (0 vs. 1)",
        ),
        (
            "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.malloc.restype = ctypes.c_void_p\n"
            # The last of many: what was in the tcache of this size is used up, so there is room.
            "x = [ctypes.c_void_p(libc.malloc(1000)) for _ in range(50)][-1]\n"
            "libc.free(x)\nlibc.free(x)\nlibc.free(x)",
            "crashed with SIGABRT (native code aborted): free(): double free detected in tcache 2",
        ),
    ],
    ids=["glog", "glibc"],
)
def test_crash_message_contains_the_last_output_of_native_code(
    driver: Driver, dies: str, said: str
) -> None:
    seen = driver.run([], f"import os\n{dies}", ranks=1)
    assert seen.result.failure is not None
    assert seen.result.failure.message == said


@pytest.fixture
def small_disk(starts_processes: None, tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"file systems cannot be mounted here: {made.stderr.decode().strip()}")
    yield tmp_path
    # Lazy: a kept prelude may have a file of its run open.
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


FULL = """\
import os, time, tpunb
rank = int(os.environ["RANK"])
for step in tpunb.track(range(60)):
    tpunb.log(step, loss=float(step))
    if step == 20 and rank == 0:
        try:
            with open("fill", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError:
            full = True
    time.sleep(0.03)
"""


def test_full_disk_metrics_that_are_lost_are_counted(driver: Driver, small_disk: Path) -> None:
    other = Driver(small_disk)
    other.launcher = driver.launcher
    seen = other.run([], FULL, cwd=str(small_disk))
    assert seen.result.state == "succeeded", seen.result.failures
    steps = [(row["rank"], row["step"]) for row in read_rows(seen.result.dir / "metrics.jsonl")]
    assert set(steps) <= {(rank, step) for rank in (0, 1) for step in range(60)}
    lost = seen.result.lost_records
    assert lost == 120 - len(steps) > 0
    assert seen.result.lacks() == f", but {lost} of its metrics were not written"


def test_full_disk_failure_names_the_cause_and_keeps_what_was_written(
    driver: Driver, small_disk: Path
) -> None:
    """Who fills it fails, says why, and nothing that was written before is lost."""
    other = Driver(small_disk)
    other.launcher = driver.launcher
    # Both ranks have begun before one of them fills it.
    together = """
        import os, pathlib, time
        def together():
            folder = pathlib.Path(os.environ["TPUNB_RUN"])
            (folder / f"here-{os.environ['RANK']}").touch()
            while len(list(folder.glob("here-*"))) < 2:
                time.sleep(0.01)
    """
    flood = "together(); print('first', flush=True)\n\nfor _ in range(100_000): print('x' * 50)"
    seen = other.run([together], flood)
    assert seen.result.state == "failed"
    assert seen.result.failure is not None
    assert seen.result.failure.headline().endswith(
        "failed in cell [2], line 3: OSError: [Errno 28] No space left on device"
    )
    # What its log says of the cause, and its times, are read anew each time, not kept.
    assert [diagnosis.id for diagnosis in seen.result.diagnoses] == ["disk-full"]
    assert RunDir(seen.result.dir).read_result() == replace(
        seen.result, diagnoses=(), summary=Summary()
    )
    assert any(line.endswith("] first") for line in seen.log)
    assert any("run.log is not complete: No space left" in note.text for note in seen.of(Note))
    assert not list(seen.result.dir.rglob("*.room"))
    assert driver.run([], "print('next')").result.state == "succeeded"


def test_full_disk_still_has_reserved_blocks_for_important_files(small_disk: Path) -> None:
    kept, other = small_disk / "kept.json", small_disk / "other.json"
    files.reserve_blocks(kept)
    files.reserve_blocks(small_disk / "lines", appended=True)
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "rest").write_bytes(bytes(2**20))
    with pytest.raises(OSError, match="No space left"):
        files.write_json(other, {"a": "b" * 5000})
    files.write_json(kept, {"a": "b" * 50_000})
    files.append_text(small_disk / "lines", "c" * 50_000)
    assert len(json.loads(kept.read_text())["a"]) == 50_000
    assert (small_disk / "lines").read_text() == "c" * 50_000


@pytest.mark.usefixtures("starts_processes")
def test_oom_detector_without_an_oom_kill() -> None:
    watch = memory.OomDetector()
    child = subprocess.Popen(["sleep", "100"])
    child.kill()
    child.wait()
    assert watch.evidence(child.pid) == ""
