"""The norm of heads' outputs."""
