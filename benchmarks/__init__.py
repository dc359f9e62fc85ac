"""Speed measurements; each prints ratios taken in one run."""
