"""The short causal convolution in front of a recurrence."""
