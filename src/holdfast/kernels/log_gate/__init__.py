"""The log decay of a gate: the logarithm of a sigmoid, divided."""
