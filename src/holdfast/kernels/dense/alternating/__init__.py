"""Two launches a step: a matrix product, and the cell."""
