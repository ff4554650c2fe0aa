"""Rewrite notebooks of torch_xla for TorchTPU: `tpunb migrate --to torchtpu`."""
