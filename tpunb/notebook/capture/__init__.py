"""From the cell that was just run to the notebook as it is now: `Snapshot`."""
