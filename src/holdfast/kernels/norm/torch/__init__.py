"""The short convolution in PyTorch's own operations, on any device."""
