"""DTensors taken apart and put together, with private names of torch (2.8 to 2.15)."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: its shape, and where in the whole tensor it begins."""
Mesh = tuple[str, Any, tuple[str, ...] | None]
"""A mesh's type of device, its ranks as nested lists, and the names of its dimensions."""


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor."""
    local: torch.Tensor = tensor._local_tensor
    return local


def mesh_data(mesh: DeviceMesh) -> Mesh:
    """Return a mesh as plain data."""
    return mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names


def placements_of(tensor: Any) -> list[tuple[int, ...]]:
    """Return a DTensor's placements as plain data, one for each dimension of its mesh.

    () is Replicate(), (dim,) is Shard(dim), and (dim, True) the shard that FSDP makes of a shard
    of tensor parallelism. Raises TypeError for others, such as sums that are still to be made.
    """
    found: list[tuple[int, ...]] = []
    for placement in tensor.placements:
        if isinstance(placement, Replicate):
            found.append(())
        elif isinstance(placement, _StridedShard):  # in torch 2.9 a subclass of Shard
            found.append((placement.dim, True))
        elif isinstance(placement, Shard):
            found.append((placement.dim,))
        else:
            raise TypeError(f"a DTensor with {placement!r}, whose parts are not added up yet")
    return found


def is_first_replica(tensor: Any) -> bool:
    """True in one of the ranks that hold the same part of a DTensor; False outside its mesh."""
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and not any(
        at and isinstance(placement, Replicate)
        for at, placement in zip(coordinate, tensor.placements, strict=True)
    )


def local_box(shape: Sequence[int], mesh: DeviceMesh, placements: list[tuple[int, ...]]) -> Box:
    """Return which part of a tensor of this shape is this rank's."""
    found = compute_local_shape_and_global_offset(
        torch.Size(shape), mesh, _placements(placements, mesh)
    )
    sizes, offsets = map(tuple, found)
    return sizes, offsets


def find_mesh(mesh: Mesh) -> DeviceMesh | None:
    """Return this process's mesh that is most like one of another process; None if none is.

    It has the same names and number of dimensions, and the same ranks if there is such a mesh: in
    a run with other ranks, the largest. A mesh that is only equal by its ranks would not do: in
    torch 2.13 a part of a larger mesh is equal to the same part of that mesh only. torch keeps no
    list of meshes, so they are looked for among all objects: 0.1 s for a million.
    """
    _, ranks, names = mesh
    shape = torch.tensor(ranks).shape
    found = [
        each
        for each in gc.get_objects()
        if type(each) is DeviceMesh
        and each.mesh_dim_names == names
        and each.mesh.ndim == len(shape)
        and each.get_coordinate() is not None
    ]
    found.sort(key=lambda each: (mesh_data(each) == mesh, each.mesh.numel()))
    return found[-1] if found else None


def _placements(placements: list[tuple[int, ...]], mesh: DeviceMesh) -> tuple[Placement, ...]:
    made: list[Placement] = []
    for at, place in enumerate(placements):
        if len(place) == 2:
            shards = [mesh.size(i) for i in range(at + 1, mesh.ndim) if placements[i] == place[:1]]
            made.append(_StridedShard(place[0], split_factor=math.prod(shards)))
        else:
            made.append(Shard(place[0]) if place else Replicate())
    return tuple(made)


def make_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: list[tuple[int, ...]],
    shape: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    """Return a DTensor of this rank's part, which stays on its device.

    (`DTensor.from_local` moves it to the mesh's device: a checkpoint would be there twice.)
    """
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    spec = DTensorSpec(mesh, _placements(placements, mesh), tensor_meta=meta)
    made: torch.Tensor = DTensor(local, spec, requires_grad=False)
    return made
