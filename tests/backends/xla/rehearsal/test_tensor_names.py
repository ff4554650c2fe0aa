"""Tensors have the names that the user's code has for them."""

from __future__ import annotations

from tests.drivers.ranks import Ranks, rehearse


def named() -> list[list[str]]:
    rehearse()
    import torch
    import torch_xla

    from tpunb.backends.xla.rehearsal import tensor_names

    def number(*tensors: torch.Tensor) -> list[int]:
        return [torch_xla._XLAC._xla_get_tensor_id(tensor) for tensor in tensors]  # type: ignore[attr-defined]

    device = torch_xla.device()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).to(device)
    batch = {"x": torch.ones(3, 2, device=device)}
    model(batch["x"]).sum().backward()
    on_cpu = torch.ones(2)

    def inner(p: torch.Tensor) -> list[list[str]]:
        found = tensor_names.TensorNames()
        return [
            found.of(number(p, p.grad)),  # type: ignore[arg-type]
            found.of(number(model[1].running_mean, batch["x"])),
            found.of(number(torch.ones(2, device=device))),
            found.of([]),
        ]

    assert on_cpu.device.type == "cpu"
    return inner(model[0].weight)


def test_tensor_names_of_parameters_buffers_gradients_variables(ranks: Ranks) -> None:
    (found,) = ranks.values(named, 1)
    assert found == [
        ["model.0.weight", "model.0.weight.grad"],
        ["model.1.running_mean", "batch['x']"],
        [],
        [],
    ]
