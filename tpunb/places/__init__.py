"""Where a run goes besides this machine: hosts reached by ssh or gcloud.

A place is five calls (`place.Place`: start, follow, state, stop, fetch), and before them a target
(`target.Target`): what a run depends on, what it costs, what cannot be had. `kinds` finds both.
`config` reads `places.toml`; `mirror` is the process that keeps the run's folder here as the union
of the hosts' folders, so that everything else reads a run of a place as any other.
"""
