"""In PyTorch."""
