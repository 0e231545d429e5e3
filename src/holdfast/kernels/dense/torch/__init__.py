"""The dense family in PyTorch, on any device."""
