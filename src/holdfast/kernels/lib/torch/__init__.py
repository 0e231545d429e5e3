"""Building blocks in PyTorch."""
