"""Gradients of functions that run inside a custom op."""
