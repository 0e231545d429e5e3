"""Writes of beta (v - S^T k) k^T: DeltaNet, Gated DeltaNet."""
