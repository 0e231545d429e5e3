"""Holdfast's ops in the place of other libraries', without a change to the code that calls those."""
