"""Places other than this machine to which runs are sent: hosts; what clusters and Kaggle need.

Hosts have four calls (`place.Place`: start, follow, stop, fetch). Before a run starts, its
`target.Target` gives what the run depends on, and what it costs. `kinds` finds both. A cluster gets
a manifest (`jobset`), Kaggle the notebook (`kaggle`). `config` reads `places.toml`. `mirror` is the
process that keeps the local run folder as the union of the hosts' folders, so that everything else
reads a run at a place like any other.
"""
