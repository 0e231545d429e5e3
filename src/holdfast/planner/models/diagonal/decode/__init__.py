"""What a few tokens on a pool of states cost."""
