"""In PyTorch, on any device."""
