"""Notebooks written for older torch_xla, rewritten for the current one."""
