"""The supervisor of a run: it starts, watches and ends every process; standard library only."""
