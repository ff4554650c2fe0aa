"""torch.distributed alone: gloo on processors, nccl on CUDA devices."""
