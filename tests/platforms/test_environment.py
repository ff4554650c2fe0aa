from __future__ import annotations

from tpunb.platforms import environment


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
