"""Building blocks in Gluon."""
