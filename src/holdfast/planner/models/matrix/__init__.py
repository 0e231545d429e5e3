"""Matrix recurrences."""
