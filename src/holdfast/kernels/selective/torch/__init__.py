"""The selective family in PyTorch, on any device."""
