"""Exact accounting. Knows nothing of models or data."""
