"""What runs in the kernel: the magics, and the session that starts runs and follows them."""
