"""This machine: its device and cores, its problems, and the environment that a run needs on it."""
