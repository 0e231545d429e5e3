"""Outputs inside chunks, and their gradients."""
