"""Packages that fit together or do not, judged by their metadata alone."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fakes.machine import FakeMachine
from tests.machine.machines import OF_KAGGLE, PAIR, TORCH_TPU, ids, look, machine
from tpunb.machine import packages
from tpunb.runs.spec import BackendName
from tpunb.utils.install_commands import UV_INSTALL

pytestmark = pytest.mark.usefixtures("starts_processes")

UV = f"`{UV_INSTALL} "
COLAB_FIX = f"{UV}torch==2.9.0 'torch_xla[tpu]==2.9.0'`, then Runtime > Restart session"
KAGGLE_FIX = (
    f"{UV}torch==2.8.0 'torch_xla[tpu]==2.8.0' libtpu==0.0.17`, "
    "then Run > Restart & clear cell outputs"
)


def without(packages: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: version for name, version in packages.items() if name not in names}


@pytest.mark.parametrize(
    ("place", "packages", "found", "words"),
    [
        # undefined-symbol-cpu-fallback, undefined-symbol-foreach-erf: torch was upgraded
        (
            "colab-tpu",
            PAIR | {"torch": "2.15.0", "torchvision": "0.30.0"},
            "torch-pair",
            ["torch 2.15.0 and torch_xla 2.9.0 do not belong together", "torchvision==0.24.0 "],
        ),
        # a Colab CPU runtime has a torch that is newer than any torch_xla
        ("colab-cpu", {"torch": "2.11.0+cpu"}, "torch-xla-missing", ["torch==2.9.0 "]),
        (
            "laptop",
            {},
            "torch-xla-missing",
            [
                "torch and torch_xla are not installed",
                f"{UV}torch==2.9.0 torch_xla==2.9.0`",
            ],
        ),
        ("laptop", PAIR | {"torch_xla": "2.5.0", "torch": "2.5.1"}, "torch-xla-release", ["2.8.0"]),
        # libtpu-module-not-found
        ("v5e-8", without(PAIR, "libtpu"), "libtpu-missing", ["'torch_xla[tpu]==2.9.0'"]),
        # pjrt-plugin-attributes-size-kaggle-2025: jax brought its own libtpu
        (
            "kaggle-tpu",
            OF_KAGGLE | {"libtpu": "0.0.23", "jax": "0.7.2"},
            "libtpu-release",
            [
                "libtpu 0.0.23",
                "with libtpu 0.0.17,",
                "never upgrade libtpu or jax alone",
                KAGGLE_FIX,
            ],
        ),
    ],
)
def test_a_mismatch_is_the_first_thing_to_mend(
    place: str, packages: dict[str, str], found: str, words: list[str], tmp_path: Path
) -> None:
    with machine(place, tmp_path) as made:
        problem, *others = look(made, packages).problems
    assert ([problem.id], others) == ([found], [])
    for text in words:
        assert text in f"{problem.message} {problem.fix}"


TORCH = "'torch>=2.11,<2.16'"
TPU_FIX = f"--torch-backend=cpu {TORCH} 'torch_tpu>=0.2.0'`"


@pytest.mark.parametrize(
    ("place", "packages", "backend", "found", "words"),
    [
        # Colab's CPU runtime: nothing is missing
        ("colab-cpu", {"torch": "2.11.0+cpu"}, "torchtpu", ([], ["no-tpu-runtime"]), []),
        ("colab-cpu", {"torch": "2.11.0+cpu"}, "torch", ([], ["no-tpu-runtime"]), []),
        ("laptop", {"torch": "2.15.0"}, "torch", ([], []), []),
        ("laptop", {}, None, (["torch-missing"], []), [f"--torch-backend=cpu {TORCH}`"]),
        ("v6e-8", {}, None, (["torch-missing"], ["tpu-not-used"]), [TPU_FIX]),
        ("v4-8", {}, None, (["torch-missing"], ["tpu-not-used"]), ["'torch_xla[tpu]==2.9.0'"]),
        ("laptop", {"torch": "2.16.0"}, "torchtpu", ([], ["torch-release"]), ["2.11 to 2.15"]),
        ("v6e-8", TORCH_TPU | {"torch": "2.9.0"}, "torchtpu", (["torch-release"], []), [TPU_FIX]),
        (
            "v6e-8",
            TORCH_TPU | {"torch_tpu": "0.1.1", "torchvision": "0.28.0"},
            "torchtpu",
            (["torch-tpu-release"], []),
            [f"{TORCH} torchvision 'torch_tpu>="],
        ),
        # `import torch` loads torch_tpu, which aborts without libtpu
        (
            "laptop",
            {"torch": "2.13.0", "torch_tpu": "0.2.0"},
            "torchtpu",
            (["libtpu-missing"], []),
            ["torch_tpu aborts when torch is imported", "'libtpu>=0.0.50'`"],
        ),
        (
            "v6e-8",
            TORCH_TPU | {"libtpu": "0.0.21.1"},
            "torchtpu",
            (["libtpu-release"], []),
            ["torch_tpu 0.2.0 needs libtpu 0.0.50 or later"],
        ),
    ],
)
def test_what_a_backend_needs(
    place: str,
    packages: dict[str, str],
    backend: BackendName | None,
    found: tuple[list[str], list[str]],
    words: list[str],
    tmp_path: Path,
) -> None:
    with machine(place, tmp_path) as made:
        report = look(made, packages, backend=backend)
    assert ids(report) == found
    text = "".join(f"{one.message} {one.fix}" for one in (*report.problems, *report.advice))
    for part in words:
        assert part in text


def test_a_gpu_that_torch_cannot_use(tmp_path: Path) -> None:
    made = FakeMachine(tmp_path).file("dev/nvidia0")
    assert look(made, {"torch": "2.13.0"}, backend="torch").machine.device == "GPU"
    packages = Path(made.packages({}))
    (packages / "torch").mkdir()
    (packages / "torch/version.py").write_text("cuda: Optional[str] = None\n")
    report = look(made, {"torch": "2.13.0"}, backend="torch")
    (advice,) = report.advice
    assert (advice.id, report.machine.device) == ("torch-without-cuda", "CPU")
    assert f"--torch-backend=auto --reinstall-package torch {TORCH}`" in advice.fix


def test_a_tpu_is_not_used_since_torch_was_upgraded(tmp_path: Path) -> None:
    with machine("colab-tpu", tmp_path) as made:
        report = look(made, PAIR | {"torch": "2.15.0"}, backend=None)
    assert ids(report) == ([], ["tpu-not-used", "torch-pair"])
    assert report.advice[1].fix == COLAB_FIX


def test_a_torchvision_for_another_torch(tmp_path: Path) -> None:
    needs = {"torchvision": ["numpy", "torch==2.8.0"], "torchaudio": ["torch==2.9.0"]}
    with machine("laptop", tmp_path) as made:
        have = PAIR | {"torchvision": "0.23.0", "torchaudio": "2.9.0"}
        (advice,) = look(made, have, needs=needs).advice
    assert advice.id == "needs-torch"
    assert advice.message.startswith("torchvision 0.23.0 needs torch==2.8.0, but torch 2.9.0+cpu")
    assert "pip uninstall -y torch torchvision torchaudio" in advice.fix


def test_on_a_machine_without_a_tpu_its_library_does_not_matter(tmp_path: Path) -> None:
    with machine("laptop", tmp_path) as made:
        assert look(made, PAIR | {"libtpu": "0.0.52"}).problems == ()
        assert look(made, without(PAIR, "libtpu")).problems == ()


def test_what_was_installed_after_the_kernel_had_imported_another(tmp_path: Path) -> None:
    with machine("colab-tpu", tmp_path) as made:
        found = look(made, imported={"torch": SimpleNamespace(__version__="2.8.0+cpu")})
        same = look(made, imported={"torch": SimpleNamespace(__version__="2.9.0+cpu")})
    (problem,) = [one for one in found.advice if one.id == "restart"]
    assert "has imported torch 2.8.0+cpu, but torch 2.9.0+cpu was installed" in problem.message
    assert problem.fix.startswith("Runtime > Restart session")
    assert "restart" not in ids(same)[1]


def test_the_table_agrees_with_the_torch_xla_that_is_installed() -> None:
    xla = importlib.metadata.version("torch_xla")
    pair = packages.pair_of(packages.release_numbers(xla))
    assert pair is not None
    needs = " ".join(importlib.metadata.requires("torch_xla") or ())
    assert re.findall(r"libtpu==([0-9.]+)", needs) == [pair.libtpu]
    assert packages.release_numbers(
        importlib.metadata.version("torch")
    ) == packages.release_numbers(pair.torch)


def test_what_is_installed_here_is_read_as_importlib_reads_it() -> None:
    have = packages.read_installed()
    assert have.python == tuple(sys.version_info[:3])
    for name in ("torch", "torch_xla", "ipykernel", "numpy"):
        assert have.versions[name] == importlib.metadata.version(name)


def test_looking_imports_neither_torch_nor_the_network_libraries(tmp_path: Path) -> None:
    made = FakeMachine(tmp_path).chips("v5e", 8)
    code = (
        "import os, sys; from pathlib import Path; from tpunb.machine import doctor\n"
        "doctor.inspect_machine(os.environ, runs=Path('runs'))\n"
        "print(*sys.modules)"
    )
    env = made.env | {"GCE_METADATA_HOST": "127.0.0.1:9", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "tpunb.machine.doctor" in loaded
    assert not loaded & {"torch", "torch_xla", "numpy", "requests", "yaml"}
