"""Theta is one flat vector; a model says what to do with it."""
