"""The stacks that ranks train with: torch_xla, TorchTPU, plain torch."""
