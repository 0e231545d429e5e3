"""A few tokens of a diagonal recurrence on a pool of states."""
