"""One log decay a head."""
