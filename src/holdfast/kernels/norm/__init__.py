"""The norm of heads' outputs and the output gate."""
