"""One log decay a key channel."""
