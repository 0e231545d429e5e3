"""The matrix family in PyTorch, on any device."""
