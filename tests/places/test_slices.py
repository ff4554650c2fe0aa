from __future__ import annotations

import math

import pytest

from tpunb.machine import tpu
from tpunb.places.slices import ACCELERATORS, find_slice


@pytest.mark.parametrize(
    ("asked", "hosts", "chips", "named"),
    [
        (("v5e", "1x1"), 1, 1, "v5litepod-1"),
        (("v5p", "2x2x4"), 4, 4, "v5p-32"),
        (("v6e", "2x4"), 2, 4, "v6e-8"),
        (("v6e", "2x4", 8), 1, 8, "v6e-8"),
        (("tpu7x", "2x2x2"), 2, 4, "tpu7x-16"),
    ],
)
def test_a_slice_has_hosts_and_chips(asked: tuple, hosts: int, chips: int, named: str) -> None:
    found = find_slice(*asked)
    assert (found.hosts, found.chips, found.accelerator_type) == (hosts, chips, named)


def test_every_slice_of_the_table_is_whole_and_has_a_name_that_torch_xla_parses() -> None:
    for accelerator in ACCELERATORS.values():
        for topology in accelerator.topologies:
            found = find_slice(accelerator.name, topology)
            total = math.prod(map(int, topology.split("x")))
            assert found.hosts * found.chips == total
            parsed = tpu.parse_accelerator_type(found.accelerator_type)
            assert parsed is not None
            assert parsed[1] == total
            assert tpu.type_of_slice(accelerator.label, topology) == found.accelerator_type


@pytest.mark.parametrize(
    ("asked", "setting", "told"),
    [
        (("v4", "2x2x1"), "accelerator", "accelerators: v5e, v5p, v6e, tpu7x"),
        (("v6e", "4x2"), "topology", "v6e has 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"),
        (("v6e", "4x4x4"), "topology", "v6e has 1x1, 2x2"),
        (("v5p", "4x4x88"), "topology", "4x4x8, .* and 84 larger ones"),
        (("v6e", "4x4", 8), "chips_per_host", "hosts of a v6e of 4x4 have 4 chips"),
        (("v6e", "2x4", 2), "chips_per_host", "hosts of a v6e of 2x4 have 4 or 8 chips"),
    ],
)
def test_unknown_slice_is_refused_with_the_known_ones(
    asked: tuple, setting: str, told: str
) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        find_slice(*asked)
    assert caught.value.args[0] == setting
