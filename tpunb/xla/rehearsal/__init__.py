"""Rehearsal: several cores on CPU, for machines without a TPU. Nothing of it is active on one."""
