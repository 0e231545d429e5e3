"""Diagonal recurrences."""
