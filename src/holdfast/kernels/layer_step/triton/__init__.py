"""The step of a layer in Triton: two launches, one for what has no norm."""
