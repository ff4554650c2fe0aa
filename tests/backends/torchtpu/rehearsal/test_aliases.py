"""The same memory as a tensor of the CPU and of the device."""

from __future__ import annotations


def test_shapes_strides_and_types_are_kept() -> None:
    import torch

    from tpunb.backends.torchtpu.rehearsal.aliases import check_layout, to_cpu, to_tpu

    assert check_layout()
    for value in (
        torch.empty(0, 4),
        torch.tensor(3.0),
        torch.arange(6).view(2, 3).t()[1:],
        torch.empty(6).as_strided((1, 3), (100, 1)),
        torch.randn(1, 3, 1, 1).to(memory_format=torch.channels_last),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.float8_e4m3fn),
    ):
        there = to_tpu(value)
        back = to_cpu(there)
        assert there.device.type == "tpu"
        assert back.shape == there.shape == value.shape
        assert back.stride() == there.stride() == value.stride()
        assert back.dtype is value.dtype
        assert torch.equal(back.to(torch.complex64), value.to(torch.complex64))


def test_memory_lives_as_long_as_either() -> None:
    import torch

    from tpunb.backends.torchtpu.rehearsal.aliases import to_cpu, to_tpu

    there = to_tpu(torch.full((1000,), 3.0))
    back = to_cpu(there)
    del there
    torch.zeros(1000)
    assert back.sum().item() == 3000
