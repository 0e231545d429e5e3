"""Packed sequences in the models of kernels that give each a block of its own."""

from dataclasses import replace

from holdfast.planner import Problem


def as_batch(problem: Problem) -> Problem:
    """The N packed sequences as a batch: nothing says how long each is, so that they are taken to be equally long."""
    sequences = max(1, problem["N"])
    sizes = dict(problem.sizes) | {"B": sequences, "T": -(-problem["T"] // sequences)}
    return replace(problem, sizes=tuple(sizes.items()))
