"""Rotation of queries and keys by their position."""
