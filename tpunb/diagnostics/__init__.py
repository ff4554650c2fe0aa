"""Diagnosis of failed runs, and of XLA's work in a cell."""
