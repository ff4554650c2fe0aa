"""The processes of a run: supervisor → fork server → runner → ranks. See docs/architecture.md."""
