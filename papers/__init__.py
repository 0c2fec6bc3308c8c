"""The tables and figures of the research documents: presets, published numbers and runners."""
