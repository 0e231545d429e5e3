"""The selective family in Triton."""
