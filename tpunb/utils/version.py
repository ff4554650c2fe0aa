"""The version of tpunb; hatch reads it from here when it builds the wheel."""

__version__ = "0.1.0"
