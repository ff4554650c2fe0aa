from __future__ import annotations

from pathlib import Path

import pytest

from tests.platforms.machines import machine, patience_with
from tpunb.platforms import environment
from tpunb.platforms.fakes import DUMPS
from tpunb.platforms.machine import detect


def test_a_run_gets_its_device_and_loses_what_other_launchers_left() -> None:
    kernel = {"HOME": "/root", "RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": "1"}
    made = environment.for_run(kernel, "CPU", {"LR": "0.1"})
    added = {"PJRT_DEVICE": "CPU", "PYTHONUNBUFFERED": "1", "TQDM_MININTERVAL": "0.5", "LR": "0.1"}
    assert made == {"HOME": "/root"} | added
    assert kernel == {"HOME": "/root", "RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": "1"}


def test_every_change_has_its_reason_and_only_changes_are_listed() -> None:
    env = {"PJRT_DEVICE": "TPU", "PYTHONUNBUFFERED": "1", "TQDM_MININTERVAL": "9"}
    assert environment.changes(env, "TPU") == []
    env["LOCAL_RANK"] = "0"
    (change,) = environment.changes(env, "TPU")
    assert (change.name, change.value) == ("LOCAL_RANK", None)
    assert change.reason


def test_what_keeps_kaggles_ranks_apart_is_removed_and_addresses_of_a_pod_are_not() -> None:
    kaggle = {"TPU_PROCESS_ADDRESSES": "local", "CLOUD_TPU_TASK_ID": "0"}
    made = environment.for_run(kaggle, "TPU")
    assert not kaggle.keys() & made.keys()
    pod = {"TPU_PROCESS_ADDRESSES": "h0:8476,h1:8476", "CLOUD_TPU_TASK_ID": "1"}
    assert environment.for_run(pod, "TPU").items() >= pod.items()


def test_a_rank_draws_into_files() -> None:
    inline = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    assert environment.for_run(inline, "CPU")["MPLBACKEND"] == "Agg"
    assert environment.for_run({"MPLBACKEND": "pdf"}, "CPU")["MPLBACKEND"] == "pdf"


def test_an_agent_has_one_thread() -> None:
    made = environment.for_agent({"OMP_NUM_THREADS": "8"})
    assert made == {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def test_what_a_warm_agent_cannot_change() -> None:
    env = {"PYTHONHASHSEED": "1", "LD_PRELOAD": "x.so", "XLA_FLAGS": "--x", "KMP_INIT_AT_FORK": "0"}
    assert environment.read_at_import(env).keys() == {"PYTHONHASHSEED", "LD_PRELOAD"}


def test_secrets_are_not_kept() -> None:
    env = {"KAGGLE_KEY": "a", "hf_token": "b", "MY_PASSWORD": "c", "PATH": "/bin"}
    kept = environment.without_secrets(env)
    assert kept["PATH"] == "/bin"
    assert {kept[name] for name in env if name != "PATH"} == {"(not kept)"}


def test_what_would_be_the_same_in_every_rank_is_removed() -> None:
    kernel = {
        "OMP_PROC_BIND": "true", "GOMP_CPU_AFFINITY": "0", "TPU_VISIBLE_CHIPS": "0",
        "XRT_TPU_CONFIG": "tpu_worker;0;localhost:51011", "TPU_NAME": "my-tpu",
    }  # fmt: skip
    on_tpu = environment.for_run(kernel, "TPU")
    assert not on_tpu.keys() & (kernel.keys() - {"TPU_NAME"})
    assert on_tpu["TPU_NAME"] == "my-tpu"
    assert environment.for_run(kernel, "CPU")["TPU_VISIBLE_CHIPS"] == "0"  # it is nothing there
    assert all(change.reason for change in environment.changes(kernel, "TPU"))
    asked = {"OMP_PROC_BIND": "close"}
    assert environment.for_run(kernel, "TPU", asked)["OMP_PROC_BIND"] == "close"


def test_programs_are_kept_on_a_tpu_only_and_where_the_person_says(tmp_path: Path) -> None:
    with machine("v5e-8", tmp_path) as made:
        here = detect(made.env, patience=patience_with(made))
        kept = environment.for_run(made.env, "TPU", here=here)
        assert kept["TPUNB_XLA_CACHE"] == str(made.root / "root/.cache/tpunb/xla/v5e")
        assert "TPUNB_XLA_CACHE" not in environment.for_run(made.env, "CPU", here=here)
        for name in ("TPUNB_XLA_CACHE", "XLA_PERSISTENT_CACHE_PATH"):
            own = environment.for_run(made.env | {name: "/mine"}, "TPU", here=here)
            assert own[name] == "/mine"
            assert [one for one in own if one.endswith(("XLA_CACHE", "CACHE_PATH"))] == [name]
        elsewhere = environment.for_run(made.env | {"XDG_CACHE_HOME": "/c"}, "TPU", here=here)
        assert elsewhere["TPUNB_XLA_CACHE"] == "/c/tpunb/xla/v5e"


@pytest.mark.parametrize("name", DUMPS)
def test_every_platforms_environment_is_a_new_dict_with_reasons(name: str, tmp_path: Path) -> None:
    with machine(name, tmp_path) as made:
        here = detect(made.env, patience=patience_with(made))
        before = dict(made.env)
        changes = environment.changes(made.env, here.device, here)
        made_for_run = environment.for_run(made.env, here.device, here=here)
    assert made.env == before
    assert all(change.reason for change in changes)
    changed = {one for one in {*before, *made_for_run} if before.get(one) != made_for_run.get(one)}
    assert changed == {change.name for change in changes}
    assert made_for_run["PJRT_DEVICE"] == here.device
    # Nothing that is left makes torch_xla ask a server that cannot answer.
    if here.chips:
        assert made_for_run.get("TPU_SKIP_MDS_QUERY") or "ACCELERATOR_TYPE" in here.metadata.tpu_env


def test_a_kernel_that_used_the_tpu_itself_does_not_leave_ranks_its_one_chip(
    tmp_path: Path,
) -> None:
    one_chip = {
        "TPU_VISIBLE_CHIPS": "0",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }
    with machine("gke", tmp_path) as made:
        here = detect(made.env, patience=patience_with(made))
        plain = environment.for_run(made.env, "TPU", here=here)
        assert environment.for_run(made.env | one_chip, "TPU", here=here) == plain
    kept = {"TPU_PROCESS_BOUNDS": "2,2,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1"}  # of a pod
    assert environment.for_run(kept, "TPU").items() >= kept.items()
