"""Keys of more than 128 columns."""
