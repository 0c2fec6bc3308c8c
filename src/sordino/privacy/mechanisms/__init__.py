"""Mechanisms: where randomness comes from, and how noise is drawn and added."""
