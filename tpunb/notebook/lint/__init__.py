"""Static checks for code that would fail, hang or be slow on a TPU."""
