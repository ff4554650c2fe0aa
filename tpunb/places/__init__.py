"""Places other than this machine to which runs are sent: hosts; what clusters and Kaggle need.

Before a run starts, its `target.Target` gives what the run depends on, and what it costs; `kinds`
finds it. The run's supervisor then copies files with `transfer` and reaches the hosts with the
commands of `transport`. A cluster gets a manifest (`jobset`), Kaggle the notebook (`kaggle`).
`config` reads `places.toml`.
"""
