"""What went wrong in a run, and what XLA did with a cell."""
