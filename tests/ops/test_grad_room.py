"""Gradients that a layer's backward pass has written where its projection's gradient is."""

import pytest
import torch

from holdfast.kernels.matrix.delta_rule.hopper.backend import HopperDelta
from holdfast.kernels.matrix.mlstm.hopper.backend import HopperMLSTM
from holdfast.kernels.matrix.scalar_decay.hopper.backend import Hopper
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.kernels.matrix.variants import takes_room
from holdfast.kernels.matrix.vector_decay.hopper.backend import HopperGLA
from holdfast.kernels.matrix.wide import Wide
from holdfast.ops import matrix
from holdfast.recurrences.definition import MatrixCall
from kernels.matrix.in_room import rooms


@pytest.fixture
def call():
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 3, width, generator=draw) for width in (8, 8, 5))
    g = -torch.rand(2, 9, 3, generator=draw)
    return MatrixCall(q, k, v, g, initial_state=torch.randn(2, 3, 8, 5, generator=draw))


def gradients(call, do, dstate):
    *found, of_e = matrix.matrix_backward(do, dstate, *call, None, "simple_gla", "")
    assert not of_e.numel()
    return found


def check(call):
    do, dstate = torch.randn_like(call.v), torch.randn_like(call.initial_state)
    right = gradients(call, do, dstate)
    packed, room = rooms(call)
    for given in (room, room._replace(q=None, k=None)):
        packed.fill_(torch.nan)
        found = matrix.write_gradients(given, call, None, "simple_gla", "", (do, dstate))
        for n, exact in enumerate(right):
            assert torch.equal(exact, torch.empty(0) if found[n] is None else found[n])
        # what has no room is not copied anywhere
        for mine, place, whole in zip(found, given, room, strict=False):
            assert (mine is place) == (place is not None)
            assert whole.isnan().all() == (place is None)
        assert packed[..., -16:].isnan().all()


def test_what_a_backend_keeps_to_itself_is_copied(call):
    check(call)


def test_a_backend_that_takes_room_is_told_of_it(call, monkeypatch):
    asked = []

    class InRoom(Chunked):
        takes_room = True

        def backward(self, *given, room):
            grads, state = super().backward(*given)
            asked.append(room)
            if room.q is None:
                return grads, state
            room.q.copy_(grads[0])
            return [room.q, *grads[1:]], state

    monkeypatch.setattr(matrix, "BACKENDS", (InRoom(),))
    check(call)
    assert [[x is not None for x in room] for room in asked] == [[False] * 3, [True] * 3, [False, False, True]]


@pytest.mark.parametrize("backend", [Hopper(), HopperGLA(), HopperMLSTM()], ids=lambda x: type(x).__name__)
def test_layers_of_these_need_no_copies(backend):
    assert takes_room(Wide(backend))
    assert not takes_room(Wide(HopperDelta()))
