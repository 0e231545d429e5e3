"""Between chunks."""
