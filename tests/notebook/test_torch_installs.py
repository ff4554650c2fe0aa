from __future__ import annotations

import pytest

from tpunb.notebook.torch_installs import half_pairs, is_pair, pinned

PINS = {
    "!pip install torch==2.0.0 torchvision==0.15.1": {"torch": "2.0"},
    "%pip install -q 'torch_xla[tpu]==2.6.0' torch==2.6.0": {"torch": "2.6", "torch_xla": "2.6"},
    "pip3 install torch-xla~=2.5": {"torch_xla": "2.5"},
    "conda install pytorch==1.7": {},
    "pip install https://host/wheels/torch-nightly-cp38-cp38-linux_x86_64.whl": {
        "torch": "nightly"
    },
    "pip install torch_xla-2.1.0-cp310-cp310-manylinux_2_28_x86_64.whl": {"torch_xla": "2.1"},
    "pip install torch": {},
    "pip install torch-geometric==2.0 my-torch==1.0": {},
    "echo torch==2.0": {},
}


@pytest.mark.parametrize(("command", "found"), PINS.items())
def test_what_a_command_pins(command: str, found: dict[str, str]) -> None:
    assert pinned(command) == found


@pytest.mark.parametrize(
    ("commands", "halves"),
    [
        (["pip install torch==2.0.0"], {0: "torch 2.0"}),
        (["pip install torch==2.9.0"], {}),
        (["pip install torch==2.6.0 torch_xla==2.6.0"], {}),
        (["pip install torch==2.6.0", "pip install torch_xla[tpu]==2.6.0"], {}),
        (["pip install torch==2.6.0 torch_xla==2.5.0"], {0: "torch 2.6 and torch_xla 2.5"}),
        (["pip install torch==2.6.0", "pip install torch_xla==2.9.0"], {0: "torch 2.6"}),
        (["pip install torch_xla==2.1.0"], {0: "torch_xla 2.1"}),
        (
            ["pip install torch==2.6.0 torch_xla==2.6.0", "pip install torch==2.5.0"],
            {0: "torch 2.6 and torch_xla 2.6", 1: "torch 2.5"},
        ),
        (["pip install numpy"], {}),
    ],
)
def test_halves_of_a_pair(commands: list[str], halves: dict[int, str]) -> None:
    assert half_pairs(enumerate(commands)) == halves


def test_pair_of_one_release() -> None:
    assert is_pair("pip install torch==2.6.0 'torch_xla[tpu]==2.6.1'")
    assert not is_pair("pip install torch==2.6.0 torch_xla==2.5.0")
    assert not is_pair("pip install torch==2.6.0")
