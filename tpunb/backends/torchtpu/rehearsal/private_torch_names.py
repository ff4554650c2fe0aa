"""The private names of torch that the rehearsed device uses, and why.

Data only. tests/backends/torchtpu/rehearsal/test_private_torch_names.py checks that this package
uses no others, and that each still exists.
"""

from __future__ import annotations

from collections.abc import Mapping

VERSIONS = ("2.11", "2.13", "2.14", "2.15")
"""Versions of torch in which the names were checked."""

NAMES: Mapping[str, str] = {
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend": (
        "registers a device whose kernels are in Python"
    ),
    "torch._C._acc.PrivateUse1Hooks": "its argument",
    "torch._C._acc.DeviceGuard": "takes errors of hooks in backward, which end the process",
    "torch._C._autograd.DeviceType": "what it answers",
    "torch.autograd.graph._engine_run_backward": "replaced: raises these errors",
    "torch._C._to_dlpack": "the memory of a tensor of any device, without torch.Tensor's checks",
    "torch._C._from_dlpack": "a tensor over that memory",
    "torch.Tensor._neg_view": "sets the negative bit, which DLPack lacks",
    "torch._C.DispatchKey": "the keys of kernels",
    "torch._C.DispatchKeySet": "the key that an autocast kernel excludes",
    "torch._C._ExcludeDispatchKeyGuard": "excludes it",
    "torch.ops.aten.add.Tensor._op": "an operation, without the Python around it",
    "torch.ops.aten.add.Tensor._op_dk": "its kernel for one key, past the dispatcher",
    "torch.ops.aten.add.Tensor._schema": "what it writes and returns",
    "torch._C._dispatch_get_registrations_for_dispatch_key": "which operations have a kernel",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "whether one has",
    "torch._C._dispatch_has_computed_kernel_for_dispatch_key": "or is made of others that have",
    "torch._C._is_alias_of": "whether two tensors share a storage",
    "torch._C._is_torch_function_mode_enabled": "whether a mode would see a kernel's own calls",
    "torch._C.DisableTorchFunction": "hides them from it",
    "torch._C._functorch.is_functorch_wrapped_tensor": "whether vmap or grad wraps a tensor",
    "torch._C._get_flash_sdp_enabled": "what torch.nn.attention.sdpa_kernel allows",
    "torch._C.Generator": "the class of generators, which torch.Generator is replaced above",
    "torch.Generator._cdata": "one generator, as any object of Python for it",
    "torch._TorchCompileInductorWrapper": "refuses backend='inductor', as torch_tpu does",
    "torch._dynamo.trace_rules": "keeps torch.compile from tracing the kernels",
    "torch._dynamo.config": "allow_rnn, which torch_tpu sets",
    "torch._dynamo.backends.registry": "the backend `tpu` (documented for authors of backends)",
    "torch._inductor.config": "whether there is a C++ compiler",
    "torch.utils._pytree": "the tensors in a graph's inputs",
    "torch._C._accelerator_synchronizeDevice": "replaced, as those below: C++ hooks of a device",
    "torch._C._accelerator_emptyCache": "",
    "torch._C._accelerator_emptyHostCache": "from 2.12 on",
    "torch._C._accelerator_isAllocatorInitialized": "",
    "torch._C._accelerator_getDeviceStats": "",
    "torch._C._accelerator_getMemoryInfo": "",
    "torch._C._accelerator_resetPeakStats": "",
    "torch._C._accelerator_resetAccumulatedStats": "",
    "torch._C._accelerator_getDeviceCapability": "",
    "torch._C._accelerator_setDeviceIndex": "",
    "torch._C._accelerator_exchangeDevice": "",
}
"""Full names; of methods and attributes, on one class or operation that has them."""

SOME_VERSIONS = frozenset({"torch._C._accelerator_emptyHostCache"})
"""Names that the oldest of VERSIONS does not have yet."""
