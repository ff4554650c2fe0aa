"""The private names that `tpunb.log` and `tpunb.save` use behave as expected."""

from __future__ import annotations

from tests.drivers.ranks import Ranks


def private_names() -> None:
    import torch
    import torch_xla

    value = torch.ones((), device=torch_xla.device())
    assert torch._is_functional_tensor(value)
    torch._sync(value)
    assert not torch._is_functional_tensor(torch._from_functional_tensor(value))


def test_the_private_names_mean_what_they_did(ranks: Ranks) -> None:
    ranks.values(private_names, 1)
