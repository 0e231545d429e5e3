"""The arithmetic of packed sequences over parts, against a count of every token."""

import random
from itertools import pairwise

import pytest

from holdfast.parallel.places import Piece, places_of


def counted(lengths, bounds):
    """Of each span, the sequences of its tokens in order, token by token."""
    of_token = [n for n, (start, end) in enumerate(pairwise(bounds)) for _ in range(start, end)]
    tokens, found = iter(enumerate(of_token)), []
    for length in lengths:
        found.append([next(tokens) for _ in range(length)])
    return found


@pytest.mark.parametrize("seed", range(60))
def test_pieces_are_the_tokens(seed):
    draw = random.Random(seed)
    lengths = [draw.choice([0, 0, 1, 2, 5, 9]) for _ in range(draw.randint(1, 6))]
    total = sum(lengths)
    inner = sorted(draw.randint(0, total) for _ in range(draw.randint(0, 6)))
    bounds = [0, *inner, total]
    places = places_of(lengths, bounds)
    last_tokens = {end - 1: n for n, (start, end) in enumerate(pairwise(bounds)) if end > start}
    ended = []
    for span, tokens in enumerate(counted(lengths, bounds)):
        pieces = places.pieces(span)
        assert [n for piece in pieces for n in [piece.sequence] * piece.length] == [n for _, n in tokens]
        assert [piece.sequence for piece in pieces] == sorted({piece.sequence for piece in pieces})
        ended += [piece.sequence for piece in pieces if piece.ends]
        for piece in pieces:
            own = [token for token, n in tokens if n == piece.sequence]
            if own:
                assert piece.begins == (bounds[piece.sequence] in own)
                assert piece.ends == (last_tokens.get(own[-1]) == piece.sequence)
        start, end, sequence = places.outgoing(span)
        crossing = places.crossing(span + 1)
        assert sequence == crossing
        expected = [n for n, (_, of) in enumerate(tokens) if of == crossing] if crossing is not None else []
        assert list(range(start, end)) == expected
        if crossing is not None:
            begun = places.begun_in(crossing)
            assert begun <= span
            assert bounds[crossing] in [token for token, _ in counted(lengths, bounds)[begun]]
    # each sequence ends once, the empty ones too
    assert sorted(ended) == list(range(len(bounds) - 1))


def test_empty_sequences_at_the_end_are_the_last_spans():
    places = places_of([2, 3, 0], [0, 5, 5])
    assert places.pieces(1) == [Piece(0, 3, False, True)]
    assert places.pieces(2) == [Piece(1, 0, True, True)]


@pytest.mark.parametrize(
    ("bounds", "says"),
    [([0, 4], "T = 5; got 0 to 4"), ([1, 5], "got 1 to 5"), ([0, 3, 2, 5], "do not decrease; got 3 then 2 at 2")],
)
def test_wrong_offsets_are_named(bounds, says):
    with pytest.raises(ValueError, match=f"cu_seqlens: .*{says}"):
        places_of([2, 3], bounds)
