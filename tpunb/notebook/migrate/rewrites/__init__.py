"""The rewrites of `tpunb migrate`, one module for each kind of change."""
