"""The chunk primitives."""
