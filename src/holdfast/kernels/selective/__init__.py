"""Kernels of the selective family: a state of N numbers a channel, each with a decay of its own."""
