"""In Triton."""
