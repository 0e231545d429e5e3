"""A cell's graphs as device code."""
