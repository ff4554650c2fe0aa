from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tpunb.utils import one_rank


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC_", "MASTER_", "TPUNB_RUN")) or "RANK" in name:
            del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


def variables_of_torchrun() -> set[str]:
    """Those that torch's documentation of torchrun lists."""
    text = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK ROLE_WORLD_SIZE "
    text += "MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS "
    return set((text + "TORCHELASTIC_RUN_ID").split())


@pytest.mark.parametrize("own", [{}, {"MASTER_PORT": "29500", "SLURM_STEP_NUM_TASKS": "1"}])
def test_a_process_that_is_alone_gets_what_is_missing(own: dict[str, str]) -> None:
    os.environ.update(own, MASTER_ADDR=own.get("MASTER_ADDR", ""))  # as in a compose file
    one_rank.set_variables()
    assert variables_of_torchrun() <= {name for name, value in os.environ.items() if value}
    assert own.items() <= os.environ.items()
    assert (os.environ["RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("0", "1")
    before = dict(os.environ)
    one_rank.set_variables()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    "own",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0"},
        {"MASTER_ADDR": "first-host", "MASTER_PORT": "29500"},
        {"SLURM_STEP_NUM_TASKS": "2"},
        {"OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
        {"TPUNB_RUN": "runs/one"},
    ],
)
def test_nothing_is_added_where_the_process_may_be_one_of_several(own: dict[str, str]) -> None:
    os.environ.update(own)
    before = dict(os.environ)
    one_rank.set_variables()
    assert dict(os.environ) == before
