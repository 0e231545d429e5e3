"""What the tests of holdfast.parallel run on several ranks: a pool of processes over gloo, and the cases."""
