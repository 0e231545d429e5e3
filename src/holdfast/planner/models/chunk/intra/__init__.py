"""Inside chunks."""
