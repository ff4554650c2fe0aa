"""The kernel's side: the magics, and the session that starts runs and follows them."""
