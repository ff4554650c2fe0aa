"""Capture the current notebook of a running kernel as a `Snapshot`."""
