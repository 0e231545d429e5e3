"""Kernels of the dense family: vectors of state per head, a matrix product and a pointwise cell a step."""
