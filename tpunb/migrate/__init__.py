"""Notebooks written for older torch_xla, rewritten for the current one."""

from tpunb.migrate.changes import Change, Migration
from tpunb.migrate.documents import MigratedText, migrate_text
from tpunb.migrate.notebook import migrate

__all__ = ["Change", "MigratedText", "Migration", "migrate", "migrate_text"]
