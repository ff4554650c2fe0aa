"""Ranks on CPU cores: their store, the wire between them, and what they compare."""
