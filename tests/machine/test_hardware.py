"""Every problem with the device, produced on a fake machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.fakes.dumps import DUMPS
from tests.fakes.machine import FakeMachine
from tests.fakes.metadata import FakeMetadataServer
from tests.machine.machines import TORCH_TPU, ids, look, machine
from tpunb.machine import environment, hardware

pytestmark = pytest.mark.usefixtures("starts_processes")


def test_a_tpu_that_is_asked_for_and_not_there(tmp_path: Path) -> None:
    made = FakeMachine(tmp_path, {"PJRT_DEVICE": "TPU"})
    (problem,) = look(made).problems
    assert problem.id == "no-tpu"
    assert "unset PJRT_DEVICE" in problem.fix
    del made.env["PJRT_DEVICE"]  # the fix
    assert look(made).problems == ()


def test_colab_and_kaggle_say_where_a_tpu_is_had(tmp_path: Path) -> None:
    for name, menu in (("colab-gpu", "Change runtime type"), ("kaggle-cpu", "Accelerator")):
        with machine(name, tmp_path / name) as made:
            made.env["PJRT_DEVICE"] = "TPU"
            (problem,) = look(made).problems
            assert (problem.id, menu in problem.fix) == ("no-tpu", True)
            del made.env["PJRT_DEVICE"]
            (advice,) = look(made).advice
            assert (advice.id, menu in advice.fix) == ("no-tpu-runtime", True)


def test_a_tpu_that_is_not_used(tmp_path: Path) -> None:
    with machine("v5e-8", tmp_path) as made:
        made.env["PJRT_DEVICE"] = "CPU"
        found = look(made)
    assert ids(found) == ([], ["tpu-not-used"])
    assert (found.machine.device, found.cores) == ("CPU", found.machine.default_cores)


def test_a_container_without_the_device_files(tmp_path: Path) -> None:
    made = FakeMachine(tmp_path, dict(DUMPS["gke"].env)).chips("v5e", 8, files=False)
    (problem,) = look(made).problems
    assert problem.id == "no-device-files"
    assert "--privileged --net=host" in problem.fix
    FakeMachine(tmp_path).file("dev/vfio/0")  # the fix
    assert look(made).problems == ()


def test_device_files_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FakeMachine(tmp_path, dict(DUMPS["gke"].env)).chips("v5e", 8)
    monkeypatch.setattr(os, "access", lambda path, mode: "vfio" not in str(path))  # for root
    (problem,) = look(made).problems
    assert problem.id == "device-files-closed"
    assert f"`sudo chmod a+rw {made.root}/dev/vfio/0 " in problem.fix


def test_runs_get_the_topology_where_no_metadata_server_has_it(tmp_path: Path) -> None:
    """metadata-connection-refused, tpu-version-metadata-timeout, metadata-tpu-env-404."""
    made = FakeMachine(tmp_path).chips("v4", 4)
    with FakeMetadataServer({}, "refuses") as server:
        made.env["GCE_METADATA_HOST"] = server.host
        found = look(made)
    assert ids(found) == ([], [])
    told = environment.tpu_topology(made.env, found.machine)
    assert told["TPU_ACCELERATOR_TYPE"] == "v4-8"
    assert environment.tpu_topology(made.env | told, found.machine) == {}


def test_a_topology_of_which_a_part_is_missing_is_completed(tmp_path: Path) -> None:
    made = FakeMachine(tmp_path, {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_ID": "0"}).chips("v6e", 8)
    found = look(made)
    assert found.problems == ()
    told = environment.tpu_topology(made.env, found.machine)
    assert told["TPU_ACCELERATOR_TYPE"] == "v6e-8"
    assert told["TPU_CHIPS_PER_HOST_BOUNDS"] == "2,4,1"
    assert not told.keys() & made.env.keys()


def test_one_host_of_several(tmp_path: Path) -> None:
    with machine("v5e-16", tmp_path) as made:
        found = look(made)
        alone = look(made, cores=1)  # the fix
    (problem,) = found.problems
    assert (problem.id, problem.fix) == ("cores", "`%tpu_setup --cores 1`")
    refused = found.machine.check_cores(4)
    assert refused is not None
    assert refused.startswith("4 cores: this is host 1 of the 4 of a v5litepod-16")
    assert alone.problems == ()
    assert alone.machine.check_cores(1) is None
    assert environment.tpu_topology(made.env, found.machine) == {}


def test_v2_and_v3_have_one_rank(tmp_path: Path) -> None:
    for name in ("v2-8", "v3-8"):
        with machine(name, tmp_path / name) as made:
            found = look(made)
        here = found.machine
        assert found.cores == here.default_cores == 1
        assert here.check_cores(1) is None
        refused = here.check_cores(4)
        assert refused is not None
        assert f"a TPU {name[:2]} gives each process 2 devices" in refused
        assert refused.startswith("4 cores: ")
    unknown = FakeMachine(tmp_path / "unknown").chips("v3", 4)
    with FakeMetadataServer({}, "refuses") as server:
        unknown.env["GCE_METADATA_HOST"] = server.host
        found = look(unknown)
    assert (found.machine.generation, found.cores) == ("v2 or v3", 1)


def test_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = FakeMachine(tmp_path).folder("dev/shm")
    assert ids(look(made)) == ([], [])
    monkeypatch.setattr(hardware, "LITTLE_DISK", 2**60)
    monkeypatch.setattr(hardware, "LITTLE_SHM", 2**60)
    assert ids(look(made)) == (["disk"], ["shm"])


def on_vfio(root: Path, generation: str, chips: int) -> FakeMachine:
    """A machine whose chips torch_tpu finds, of every generation."""
    made = FakeMachine(root, {"TPU_SKIP_MDS_QUERY": "1"}).chips(generation, chips, files=False)
    for group, chip in enumerate(sorted((root / "sys/bus/pci/devices").glob("*"))[-chips:]):
        made.file(f"dev/vfio/{group}")
        if not (chip / "iommu_group").is_symlink():
            (chip / "iommu_group").symlink_to(f"../../../kernel/iommu_groups/{group}")
    return made


@pytest.mark.parametrize(
    ("generation", "chips", "cores"), [("v7x", 4, 8), ("v6e", 4, 4), ("v4", 4, 4), ("v5e", 2, 1)]
)
def test_torchtpu_has_a_rank_for_each_device(
    generation: str, chips: int, cores: int, tmp_path: Path
) -> None:
    made = on_vfio(tmp_path, generation, chips)
    found = look(made, TORCH_TPU, backend="torchtpu")
    assert (found.machine.device, found.cores) == ("TPU", cores)
    assert ids(found) == ([], [])


def test_chips_that_torch_tpu_cannot_open(tmp_path: Path) -> None:
    with machine("v4-8", tmp_path / "v4") as made:  # /dev/accel*
        found = look(made, TORCH_TPU, backend="torchtpu")
    (problem,) = found.problems
    assert problem.id == "torchtpu-device-files"
    assert "none of this machine's 4 TPU chips" in problem.message
    assert found.machine.device == "CPU"
    none = FakeMachine(tmp_path / "none").chips("v6e", 4, files=False)
    assert ids(look(none, TORCH_TPU, backend="torchtpu"))[0] == ["no-device-files"]


def test_torchtpu_refuses_a_generation_that_it_does_not_know(tmp_path: Path) -> None:
    with machine("v3-8", tmp_path) as made:
        found = look(made, TORCH_TPU, backend="torchtpu")
    (problem,) = found.problems
    assert (problem.id, "backend xla" in problem.fix) == ("torchtpu-generation", True)
    refused = found.machine.check_cores(4)
    assert refused == "4 cores: TorchTPU does not support TPU v3; torch_xla (the backend xla) does"


def test_a_containers_limit_is_its_memory(tmp_path: Path) -> None:
    made = FakeMachine(tmp_path).memory(8)
    made.file("sys/fs/cgroup/memory.max", f"{3 * 2**30}\n")
    made.file("sys/fs/cgroup/memory.current", f"{2**30}\n")
    assert look(made).machine.memory == 2 * 2**30
    made.file("sys/fs/cgroup/memory.stat", f"active_file {2**20}\ninactive_file {2**29}\n")
    assert look(made).machine.memory == 5 * 2**29
    made.file("sys/fs/cgroup/memory.max", "max\n")
    assert look(made).machine.memory == 8 * 2**30


def test_the_page_names_everything_that_can_be_found() -> None:
    folder = Path(environment.__file__).parent
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    found = set(re.findall(r'Problem\(\s*"([a-z0-9-]+)"', source))
    assert len(found) > 15
    page = (folder.parents[1] / "docs/setup.md").read_text()
    assert {one for one in found if f"`{one}`" not in page} == set()
