"""A package, so that one of this name that is installed does not take its place."""
