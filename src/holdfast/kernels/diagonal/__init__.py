"""Kernels of the diagonal family: a state of channels or pairs, each scaled (and turned) at every step."""
