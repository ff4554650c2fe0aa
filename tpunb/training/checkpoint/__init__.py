"""`tpunb.save` and `tpunb.load`: the API, the stores of files, and the file format."""
