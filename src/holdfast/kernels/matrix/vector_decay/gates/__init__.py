"""What a layer does to the decay's inputs before the recurrence."""
