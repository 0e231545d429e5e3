"""A sequence whose tiles stay in shared memory from first to last."""
