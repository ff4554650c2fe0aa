"""Functions that a rewritten notebook gets where one call of torch_xla becomes several lines."""

from __future__ import annotations

HELPERS = {
    "average_gradients": '''\
def average_gradients(optimizer):
    """Average the gradients over all ranks, as xm.optimizer_step did before each step."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    for group in optimizer.param_groups if world > 1 else ():
        for parameter in group["params"]:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
''',
    "all_reduced": '''\
def all_reduced(op, tensors, scale=1.0):
    """Return the reduced copy of a tensor, or change a list of tensors, as xm.all_reduce did."""
    several = isinstance(tensors, (list, tuple))
    results = list(tensors) if several else [tensors.detach().clone()]
    for result in results:
        if dist.is_initialized():
            dist.all_reduce(result, op)
        result.copy_(result * scale)
    return None if several else results[0]
''',
    "all_gathered": '''\
def all_gathered(tensor, dim=0):
    """Return the tensors of all ranks, joined along a dimension, as xm.all_gather did."""
    if not dist.is_initialized():
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.detach().contiguous())
    return torch.cat(parts, dim)
''',
    "mesh_reduced": '''\
def mesh_reduced(value, reduce_fn):
    """Reduce the values of all ranks with a function of their list, as xm.mesh_reduce did."""
    values = [to_device(value, "cpu")]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, values[0])
    return reduce_fn(values)
''',
    "broadcast_parameters": '''\
def broadcast_parameters(model):
    """Give all ranks the weights of rank 0, as xm.broadcast_master_param did."""
    for tensor in (*model.parameters(), *model.buffers()) if dist.is_initialized() else ():
        dist.broadcast(tensor.data, 0)
''',
    "OneAtATime": '''\
class OneAtATime:
    """Runs a function on one rank after the other, as xmp.MpSerialExecutor did."""

    def run(self, fn):
        for rank in range(dist.get_world_size() if dist.is_initialized() else 1):
            if not dist.is_initialized() or rank == dist.get_rank():
                result = fn()
            if dist.is_initialized():
                dist.barrier()
        return result
''',
    "RateTracker": '''\
class RateTracker:
    """Counts per second since the last call of `rate`, and since the start."""

    def __init__(self):
        self.start = self.last = time.monotonic()
        self.before = self.count = 0

    def add(self, count):
        self.count += count

    def rate(self):
        seconds, count = time.monotonic() - self.last, self.count - self.before
        self.last, self.before = time.monotonic(), self.count
        return count / max(seconds, 1e-9)

    def global_rate(self):
        return self.count / max(time.monotonic() - self.start, 1e-9)
''',
    "OnDevice": '''\
class OnDevice:
    """The batches of a loader, moved to a device, as pl.MpDeviceLoader gave them."""

    def __init__(self, loader, device, **options):
        self.loader, self.device = loader, device

    def __iter__(self):
        return (to_device(batch, self.device) for batch in self.loader)

    def __len__(self):
        return len(self.loader)
''',
    "to_device": '''\
def to_device(value, device):
    """Return tensors on a device, also those in lists, tuples and dicts."""
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, dict):
        return {key: to_device(part, device) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [to_device(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
''',
}
"""By name, in the order in which a notebook gets them; they use `dist` and `torch`."""

NEEDS = {"mesh_reduced": "to_device", "OnDevice": "to_device"}
"""Helpers that call another one."""
MODULES_OF = {
    "all_gathered": ("dist", "torch"),
    "OnDevice": (),
    "to_device": (),
    "RateTracker": ("time",),
}
"""Modules that a helper needs; `dist` for the others."""
ON_CPU = frozenset({"mesh_reduced"})
"""Helpers that need a process group for tensors on the CPU as well."""
