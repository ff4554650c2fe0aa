"""Places other than this machine to which runs are sent: hosts, clusters, Kaggle.

A place has five calls (`place.Place`: start, follow, state, stop, fetch). Before a run starts, its
`target.Target` gives what the run depends on, what it costs and which options it cannot honour.
`kinds` finds both. `config` reads `places.toml`. `mirror` is the process that keeps the local run
folder as the union of the hosts' folders, so that everything else reads a run at a place like any
other.
"""
