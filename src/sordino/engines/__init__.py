"""Who executes a round."""
