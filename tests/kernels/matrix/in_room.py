"""A backward pass that writes gradients of q, k and v where it is told to, side by side with other numbers."""

import torch

from holdfast.kernels.matrix.variants import GradRoom


def rooms(call, spare=16):
    """A tensor [B, T, P] of NaN with room for gradients of q, k and v beside each other, and that room."""
    B, T = call.v.shape[:2]
    widths = [x.shape[2] * x.shape[3] for x in call[:3]]
    packed = torch.full((B, T, sum(widths) + spare), torch.nan, dtype=call.v.dtype, device=call.v.device)
    *parts, _ = packed.split([*widths, spare], -1)
    return packed, GradRoom(*(part.unflatten(-1, x.shape[2:]) for part, x in zip(parts, call[:3], strict=True)))


def assert_written_in_room(backward, call, in_place=(True, True, True)):
    """The same bits in the room as in memory of their own, and nothing beside it.

    backward(**named): (gradients of call[:6], of the initial state). in_place: which of q, k and v it writes there
    itself; the others it leaves to its caller.
    """
    right, _ = backward()
    packed, room = rooms(call)
    got, _ = backward(room=room)
    for place, mine, exact, written in zip(room, got[:3], right[:3], in_place, strict=True):
        assert (mine is place) == written
        assert torch.equal(mine, exact)
        assert place.isnan().all() != written
    for mine, exact in zip(got[3:], right[3:], strict=True):
        assert mine is exact is None or torch.equal(mine, exact)
    assert packed[..., -16:].isnan().all()
