"""What comes back from a run into the kernel."""
