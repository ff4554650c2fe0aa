"""Many runs of one notebook: what is tried, what is known of it on disk, and how it is shown.

Trials are papermill runs, which processes of their own make (`tpunb.kernel.trials`), started by
name from here: nothing of the kernel's side is imported.
"""
