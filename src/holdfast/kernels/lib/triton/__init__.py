"""Building blocks in Triton."""
