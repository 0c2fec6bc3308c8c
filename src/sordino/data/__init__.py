"""Data sources, preprocessing that costs no privacy, and partitions into clients."""
