"""Training runs: from a spec to a directory with a model, its metrics and its certificate."""
