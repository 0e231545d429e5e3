"""The step of a layer in PyTorch."""
