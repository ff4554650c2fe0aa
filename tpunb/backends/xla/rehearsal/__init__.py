"""Rehearsal: several cores on CPU, for machines without a TPU. Never active on a TPU."""
