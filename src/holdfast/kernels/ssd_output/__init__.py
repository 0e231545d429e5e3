"""The end of Mamba-2's layer before its last projection: skip, gate and norm of a scan's output."""
