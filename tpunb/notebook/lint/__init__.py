"""What would fail, hang or be slow on a TPU, found by reading the notebook."""
