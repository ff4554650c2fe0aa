"""Rewrite notebooks that were written for older releases of torch_xla."""

from tpunb.notebook.migrate.migrator import migrate, migrate_text
from tpunb.notebook.migrate.report import Change, Migration

__all__ = ["Change", "Migration", "migrate", "migrate_text"]
