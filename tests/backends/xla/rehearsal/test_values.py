"""Values move between XLA and the CPU without copies, and memory is reused."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch

from tests.drivers.lazy import torch_xla, xm
from tests.drivers.ranks import Ranks, rehearse


def shared() -> None:
    from tpunb.backends.rehearsal import buffers
    from tpunb.backends.xla.rehearsal.values import read_values, to_xla

    tensor = torch.arange(1000.0, device=torch_xla.device()) * 3
    first, second = read_values([tensor])[0], read_values([tensor])[0]
    assert first.data_ptr() == second.data_ptr()  # XLA's own

    values = [torch.arange(5.0), torch.ones(0), torch.full((3, 7), 2.0), torch.tensor(4.0)]
    flat, sizes = buffers.flatten_values(values, torch.float64)
    parts = flat.split_with_sizes(sizes)[::2]
    for value, part in zip(values, parts, strict=True):
        assert part.data_ptr() % buffers.ALIGNMENT == 0
        assert torch.equal(part.view(value.shape), value.double())
        moved = to_xla(part)
        assert value.numel() == 0 or read_values([moved])[0].data_ptr() == part.data_ptr()
        assert torch.equal(moved.cpu(), part)
    strided = torch.arange(12.0)[::2]
    for some in ([strided], [strided, values[2]]):
        joined = buffers.as_bytes(some).view(torch.float32)
        assert torch.equal(joined, torch.cat([value.reshape(-1) for value in some]))
    unaligned = torch.arange(9.0)[1:]
    for value in (unaligned, torch.arange(6.0).view(2, 3).t()):
        assert torch.equal(to_xla(value).cpu(), value)


def test_memory_is_shared_with_xla(ranks: Ranks) -> None:
    ranks.values(shared, 1)


def changed_in_place() -> list[float]:
    from tpunb.backends.rehearsal import buffers
    from tpunb.backends.xla.rehearsal.values import to_xla

    plain = buffers.memory.empty(1 << 20, torch.float32).fill_(1.0)
    tensor = to_xla(plain)
    view = tensor[:2]
    found = []
    for _ in range(3):
        tensor.add_(1)
        view.mul_(2)
        torch_xla.sync(wait=True)
        found += [tensor[0].item(), tensor[-1].item()]
    return found


def test_tensors_given_to_xla_can_be_changed_in_place(ranks: Ranks) -> None:
    assert ranks.values(changed_in_place, 1) == [[4.0, 2.0, 10.0, 3.0, 22.0, 4.0]]


def used_again() -> None:
    from tpunb.backends.rehearsal import buffers
    from tpunb.backends.xla.rehearsal.values import to_xla

    memory, count = buffers.memory, 1 << 20

    def lent(value: float) -> tuple[int, torch.Tensor]:
        plain = memory.empty(count, torch.float32).fill_(value)
        return plain.data_ptr(), to_xla(plain)

    first, one = lent(1.0)
    second, two = lent(2.0)
    assert first != second  # XLA has both
    assert one.sum().item() == count
    del one
    deadline = time.monotonic() + 20
    while (found := memory.empty(count, torch.float32)).data_ptr() != first:
        assert found.data_ptr() != second
        assert time.monotonic() < deadline
        del found
        time.sleep(0.01)
    found.zero_()
    assert two.sum().item() == 2 * count
    for _ in range(500):  # what is small is not kept for ever either
        to_xla(torch.ones(10))
    assert len(memory._lent) < 200


def lent() -> None:
    """XLA's own thread never drops the last reference to a Python object."""

    from tpunb.backends.rehearsal import buffers
    from tpunb.backends.xla.rehearsal.values import to_xla

    flat, _ = buffers.flatten_values([torch.ones(100), torch.ones(7)], torch.float32)
    tensors = [to_xla(value) for value in (*flat.split(64), torch.ones(5))]
    for each in buffers.memory._lent[-len(tensors) :]:
        assert each._base is None  # what it is a part of would be held by XLA, too
        assert each._use_count() > 1


def test_buffers_are_kept_while_xla_uses_them(ranks: Ranks) -> None:
    ranks.values(lent, 1)


def test_buffers_are_reused_after_xla_releases_them(ranks: Ranks) -> None:
    ranks.values(used_again, 1)


def of_all_sizes() -> list[float]:
    rank, world = rehearse()
    from tpunb.backends.rehearsal import mesh, wire

    device = torch_xla.device()
    inline = (mesh.INLINE - wire.HEADER.size) // 4
    room = mesh.Mesh(rank, range(world)).room // 4
    found = []
    for count in (1, inline - 1, inline, inline + 1, room // world, room, room + 1):
        value = (torch.arange(count) % 100.0 + rank).to(device)
        wanted = world * (torch.arange(count) % 100.0) + sum(range(world))
        assert torch.equal(xm.all_reduce("sum", value).cpu(), wanted)
        gathered = xm.all_gather(value, pin_layout=False).cpu().view(world, count)
        assert torch.equal(gathered[:, 0], torch.arange(world) * 1.0)
        assert torch.equal(gathered.sum(0), wanted)
        xm.all_reduce("sum", [value], 0.5)
        assert torch.equal(value.cpu(), wanted / 2)
        said = xm.rendezvous("sizes", bytes([rank]) * (count + rank))
        assert said == [bytes([r]) * (count + r) for r in range(world)]
        share = xm.reduce_scatter("sum", value.repeat(world), 1.0, 0, world)
        assert torch.equal(share.cpu(), wanted / 2 * world)
        found.append(xm.all_to_all(value.repeat(world), 0, 0, world).sum().item())
    return found


def test_small_and_large_messages_give_the_same(ranks: Ranks) -> None:
    found = ranks.values(of_all_sizes, 3)
    assert found[0] == found[1] == found[2]


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def test_free_heap_memory_is_returned_to_the_system() -> None:
    from tpunb.backends.rehearsal import buffers  # imports torch_xla, which would be every worker's

    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("this C library has no malloc_trim")
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    # Small enough for the heap. Blocks that stay are as large as those freed: smaller ones could
    # fill older gaps, and then malloc would return all freed memory by itself.
    blocks = [(libc.malloc(100_000), libc.malloc(100_000)) for _ in range(4000)]
    for block, _ in blocks:
        ctypes.memset(block, 1, 100_000)
    before = resident()
    for block, _ in blocks:
        libc.free(block)
    buffers.Heap().trim()
    assert resident() < before - 200_000_000
    for _, kept in blocks:
        libc.free(kept)
