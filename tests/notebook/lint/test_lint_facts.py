"""The facts behind rules hold for the installed torch and torch_xla, without a TPU."""

FACTS = {
    "nprocs": "ValueError: Unsupported nprocs (8)",
    "device-before-ranks": "RuntimeError: Runtime is already initialized.",
    "device-number": "IndexError",
    "cuda-amp": "torch.float32",
    "fused-optimizer": "RuntimeError: `fused=True` requires all the params",
    "compile-backend": "InductorError: KeyError: 'xla'",
    "sampler-and-shuffle": "ValueError: sampler option is mutually exclusive with shuffle",
    "torch-save-on-xla": "xla:0",
    "load-to-xla": "RuntimeError: don't know how to restore data location",
    "torch-checkpoint": "AttributeError: module 'torch' has no attribute 'xla'",
}
