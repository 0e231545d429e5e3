"""The delta rule's scan over segments, and what their outputs say of states, against loops, in Triton's interpreter."""

from itertools import pairwise

import torch

from holdfast.kernels.matrix.delta_rule.triton.segment_dstates import delta_rule_segment_dstates
from holdfast.kernels.matrix.delta_rule.triton.segment_scan import delta_rule_segment_scan
from parity import relative_error


def loop(local, transition, first, order, back):
    """The places of one sequence's segments in order, and the state that enters each; local and so on by places."""
    state = torch.zeros_like(local[0], dtype=torch.float64) if first is None else first.double()
    for at in order:
        yield at, state
        if at != order[-1]:
            through = transition[at].double().mT if back else transition[at].double()
            state = local[at].double() + through @ state


def interpreted():
    """With and without a first state, with and without rows that are not read, at widths that tiles do not divide."""
    torch.manual_seed(0)
    K, V = 40, 24
    for B, H, segments, given in ((2, 1, 2, False), (1, 2, 4, False), (2, 2, 2, True), (1, 2, 3, True)):
        first = torch.randn(B, H, K, V) if given else None
        for back, rows in ((False, segments - 1), (False, segments), (True, segments)):
            local = torch.randn(B, rows, H, K, V)
            transition = torch.randn(B, segments, H, K, K) * K**-0.5
            enter = torch.full((B, segments, H, K, V), torch.nan)
            constants = {"KEYS": K, "VALUES": V, "WIDE": 64, "BLOCK": 16, "BACK": back}
            numbers = (None, 0, H, segments, 0, rows, segments)
            delta_rule_segment_scan[(B * H, -(-V // 16))](local, transition, first, enter, *numbers, **constants)
            order = list(range(segments))[:: -1 if back else 1]
            for b in range(B):
                own = None if first is None else first[b]
                for at, state in loop(local[b], transition[b], own, order, back):
                    assert relative_error(enter[b, at].double(), state) <= 1e-5
        print(B, H, K, V, given)


# sequences of none, one and several segments of two chunks, some of them cut in a chunk
SPAN = 2
OFFSETS = (0, 0, 1, 129, 130, 130 + 4 * 64 * SPAN, 130 + 6 * 64 * SPAN + 65, 130 + 6 * 64 * SPAN + 65)


def places():
    """Of each sequence where its segments are kept, and the first token and the one behind the last of each."""
    for n, (begin, end) in enumerate(pairwise(OFFSETS)):
        starts = range(begin, max(end, begin + 1), 64 * SPAN)
        first = begin // (64 * SPAN) + n
        yield [(first + i, at, min(end, at + 64 * SPAN)) for i, at in enumerate(starts)]


def interpreted_packed():
    """With and without first states; forth and back in time."""
    torch.manual_seed(0)
    H, K, V = 2, 40, 24
    cu_seqlens, N = torch.tensor(OFFSETS, dtype=torch.int32), len(OFFSETS) - 1
    room = OFFSETS[-1] // (64 * SPAN) + N
    for given in (False, True):
        local, transition = torch.randn(room, H, K, V), torch.randn(room, H, K, K) * K**-0.5
        first = torch.randn(N, H, K, V) if given else None
        for back in (False, True):
            enter = torch.full((room, H, K, V), torch.nan)
            constants = {"KEYS": K, "VALUES": V, "WIDE": 64, "BLOCK": 16, "BACK": back}
            numbers = (cu_seqlens, OFFSETS[-1], H, 0, SPAN, 0, 0)
            delta_rule_segment_scan[(N * H, -(-V // 16))](local, transition, first, enter, *numbers, **constants)
            for n, sequence in enumerate(places()):
                order = [place for place, _, _ in sequence][:: -1 if back else 1]
                own = None if first is None else first[n]
                for at, state in loop(local, transition, own, order, back):
                    assert relative_error(enter[at].double(), state) <= 1e-5, (n, at)
                    enter[at] = torch.nan
            assert enter.isnan().all(), "of a place that is no segment's"
        print("packed", given)


def pulled_back():
    """Of a batch and of packed sequences, whose place for the first segment is not written."""
    torch.manual_seed(0)
    H, K, V = 2, 40, 24
    for B, T, cu_seqlens in ((2, 300, None), (1, OFFSETS[-1], torch.tensor(OFFSETS))):
        w, do = torch.randn(B, T, H, K, dtype=torch.float16), torch.randn(B, H, T, V, dtype=torch.float16)
        do = do.transpose(1, 2)
        segments = -(-T // (64 * SPAN)) if cu_seqlens is None else 1
        room = segments if cu_seqlens is None else T // (64 * SPAN) + len(OFFSETS) - 1
        local = torch.full((B, room, H, K, V), torch.nan)
        constants = {"KEYS": K, "VALUES": V, "WIDE": 64, "BLOCK": 16}
        numbers = (cu_seqlens, len(OFFSETS) - 1, T, H, SPAN, *do.stride()[:3])
        blocks = B if cu_seqlens is None else room
        delta_rule_segment_dstates[(blocks * H, -(-V // 16), segments)](w, do, local, *numbers, **constants)
        whole = [[(i, i * 64 * SPAN, min(T, (i + 1) * 64 * SPAN)) for i in range(segments)]]
        for sequence in whole if cu_seqlens is None else places():
            for place, begin, end in sequence[1:]:
                right = w[:, begin:end].double().permute(0, 2, 3, 1) @ do[:, begin:end].double().transpose(1, 2)
                assert relative_error(local[:, place].double(), right) <= 1e-5, place
                local[:, place] = torch.nan
        assert local.isnan().all()
    print("pulled back")


def every():
    interpreted()
    interpreted_packed()
    pulled_back()
