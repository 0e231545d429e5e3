"""One token a sequence, for every matrix recurrence."""
