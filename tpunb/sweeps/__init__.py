"""Sweeps, many runs of one notebook: search space, records on disk, scheduler and table.

Trials are papermill runs in worker processes (`tpunb.kernel.trials`). This package starts them by
name, so it imports nothing from `tpunb.kernel`.
"""
