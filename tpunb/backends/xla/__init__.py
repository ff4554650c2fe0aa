"""The seam to torch_xla: launchers, SPMD, loaders, counters, rehearsal; every private name."""
