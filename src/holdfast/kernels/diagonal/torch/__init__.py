"""The diagonal family in PyTorch, on any device."""
