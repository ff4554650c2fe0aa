"""TorchTPU: `torch.device("tpu")`, on a TPU or rehearsed on the CPU."""
