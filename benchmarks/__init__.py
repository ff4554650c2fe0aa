"""How long things take: `make bench`. Ratios of what is measured in turn in one run."""
