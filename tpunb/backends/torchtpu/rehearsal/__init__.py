"""`torch.device("tpu")` over the memory of the CPU, for machines without a TPU."""
