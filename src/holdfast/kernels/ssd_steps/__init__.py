"""Mamba-2's step sizes and log decays: what a scan takes, from what a layer projects."""
