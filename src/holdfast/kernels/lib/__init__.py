"""Building blocks of kernels; they know no recurrence."""
