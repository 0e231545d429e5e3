"""A call's launches, recorded once and run again."""
