"""Benchmarks: `make bench`. What is compared is measured alternately, in the same run."""
