"""The processes of a run: guard → agent → runner → ranks. See docs/architecture.md."""
