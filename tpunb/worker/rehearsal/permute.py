"""All-to-all and collective-permute in a rehearsal. Signatures are torch_xla's (2.8, 2.9)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpunb.worker.rehearsal.gather import EMPTY, Token, dim_problem
from tpunb.worker.rehearsal.peers import Groups, Peers, counted, describe
from tpunb.worker.rehearsal.values import on_device, read


class Exchange:
    """Ranks get what single other ranks send them."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def all_to_all(
        self,
        tensor: torch.Tensor,
        token: Token,
        split_dim: int,
        concat_dim: int,
        split_count: int,
        groups: Groups,
        pin_layout: bool,
    ) -> tuple[torch.Tensor, Token]:
        """`_XLAC._xla_all_to_all`: a leaf that requires grad as the input does, and the token."""
        counted("AllToAll")
        value = self.values(tensor, split_dim, concat_dim, split_count, groups)
        return on_device(value, tensor, gradient=True), token

    def values(
        self,
        tensor: torch.Tensor,
        split_dim: int,
        concat_dim: int,
        split_count: int,
        groups: Groups = (),
    ) -> torch.Tensor:
        """On the CPU: the i-th share of each rank's tensor went to rank i, which joins them."""
        detail = f"from dim {split_dim} to {concat_dim}"
        call = describe("all_to_all", [tensor], detail, groups)
        everyone, members = self.peers.members(call, groups)
        problem = dim_problem(tensor, split_dim, "split_dimension")
        problem = problem or dim_problem(tensor, concat_dim, "concat_dimension")
        if not problem and split_count != len(members):
            problem = f"split_count is {split_count}, of {len(members)} ranks in the group"
        if not problem and tensor.shape[split_dim] % split_count:
            problem = f"dimension {split_dim} has no {split_count} equal shares"
        if not problem and tensor.numel() == 0:
            problem = EMPTY
        if problem:
            self.peers.refuse(call, everyone, problem)
        (value,) = read([tensor])
        chunks = value.chunk(split_count, split_dim)
        flat = torch.cat([chunk.reshape(-1) for chunk in chunks])
        sizes = [flat.numel() * flat.itemsize // split_count] * split_count
        with self.peers.wire.together(call, everyone):
            received = self.peers.wire.all_to_all(
                flat.view(torch.uint8), sizes, sizes, members, call
            )
        parts = received.split(sizes)
        shape = chunks[0].shape
        return torch.cat([part.view(value.dtype).reshape(shape) for part in parts], concat_dim)

    def permute(
        self, tensor: torch.Tensor, token: Token, pairs: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, Token]:
        """`_XLAC._xla_collective_permute`: what the source in this rank's pair has, else zeros.

        Only ranks in `pairs` take part: so torch.distributed's send and recv, which are one
        pair on two ranks, need no others. A leaf that requires grad as the input does.
        """
        rank = self.peers.wire.rank
        targets = {int(source): int(target) for source, target in pairs}
        sources = {target: source for source, target in targets.items()}
        members = sorted({*targets, *sources})
        detail = f"pairs {sorted(map(list, pairs))}"
        call = describe("collective_permute", [tensor], detail)
        problem = ""
        if not len(targets) == len(sources) == len(pairs):
            problem = "XLA takes each rank as a source once and as a target once"
        elif set(members) - set(self.peers.world):
            problem = f"there are ranks 0 … {len(self.peers.world) - 1}"
        elif tensor.numel() == 0:
            problem = EMPTY
        if problem:
            self.peers.refuse(call, self.peers.world, problem)
        if rank not in members:
            return on_device(torch.zeros_like(tensor, device="cpu"), tensor, gradient=True), token
        (value,) = read([tensor])
        flat = value.reshape(-1).view(torch.uint8)
        sent = [flat.numel() * (targets.get(rank) == member) for member in members]
        expected = [flat.numel() * (sources.get(rank) == member) for member in members]
        with self.peers.wire.together(call, members):
            received = self.peers.wire.all_to_all(flat[: sum(sent)], sent, expected, members, call)
        if rank not in sources:
            received = torch.zeros_like(flat)
        result = received.view(value.dtype).reshape(value.shape)
        return on_device(result, tensor, gradient=True), token
