"""Studies over many runs: tuning, comparisons, sweeps, reports and statistical theory."""
