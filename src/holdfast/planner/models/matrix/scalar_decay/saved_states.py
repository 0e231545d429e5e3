"""How often the backward pass of a scalar decay keeps a state, at which it takes up the decay's gradient anew."""

from holdfast.planner import Problem

# chunks from one kept state to the next: where decays are a token's own; and where tokens share a rate
RARELY, OFTEN = 8, 2


def chunks_between_states(problem: Problem, rarely: int = RARELY) -> int:
    """Chunks from one kept state to the next.

    Between them what passes a whole chunk is carried on, and errs for all of its tokens alike. A gradient of each token
    shows little of that: it errs by up to 3.8e-3 with 8 of them on an H200, 5.3e-3 with 16, 5.5e-3 with 24, 7.4e-3 with
    32. That of a rate, which SSD multiplies with its strengths, adds it up: by up to 3.5e-2 with 8, by 5e-3 with OFTEN,
    for 6% of the time (docs/notes/accuracy.md#gradient-of-a-shared-rate).
    """
    return OFTEN if "beta" in problem.traits and "normalizer" not in problem.traits else rarely
