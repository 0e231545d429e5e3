"""Kernels of the matrix family: a K x V state per head, decayed and written to by outer products."""
