"""In Triton, for every NVIDIA GPU."""
