"""A layer's step."""
