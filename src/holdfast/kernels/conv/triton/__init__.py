"""The short convolution as Triton kernels."""
