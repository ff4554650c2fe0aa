"""`tpunb.save` and `tpunb.load`: the API, where files are stored, and their format."""
