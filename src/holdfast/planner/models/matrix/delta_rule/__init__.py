"""The delta rule."""
