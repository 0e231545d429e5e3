"""In Gluon, for Hopper."""
