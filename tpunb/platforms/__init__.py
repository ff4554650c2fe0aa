"""Where we are: the machine's device and cores, and the environment that a run needs there."""
