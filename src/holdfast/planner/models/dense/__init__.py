"""Dense recurrences."""
