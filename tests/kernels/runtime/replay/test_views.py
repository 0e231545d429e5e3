"""Views in a replay: each is made at once, of what owns its memory, and is what the operations would have made."""

import pytest
import torch

from holdfast.kernels.runtime import torch_private
from holdfast.kernels.runtime.replay import recording, replay

pytestmark = pytest.mark.usefixtures("on_this_machine")
CPU = torch.device("cpu")


def steps_of(call):
    (known,) = [x.cell_contents for x in call.__closure__ if isinstance(x.cell_contents, dict)]
    found = {id(x): x for x in known.values() if isinstance(x, replay.Replay)}
    (made,) = found.values()
    return [step for step, _ in made.steps]


def by_head(packed, weight):
    """A product of a part of packed, turned round, and two writes into parts of a tensor like packed."""
    u, z, rest = packed.split([6, 6, packed.shape[-1] - 12], -1)
    heads = u.flatten(0, 1).unflatten(1, (2, 3)).transpose(0, 1)
    out = torch.empty_like(packed)
    du, dz, unused = out.split([6, 6, rest.shape[-1]], -1)
    unused.zero_()
    dz.copy_(z)
    du.flatten(0, 1).unflatten(1, (2, 3)).transpose(0, 1).copy_(torch.bmm(heads, weight.mT))
    return out


@pytest.mark.parametrize("part_of", [torch_private.part_of, torch_private._as_strided], ids=["private", "public"])
@pytest.mark.parametrize("width", [12, 16])
def test_a_chain_of_views_is_one_step(part_of, width, monkeypatch):
    monkeypatch.setattr(recording, "part_of", part_of)
    call = replay.replayed(by_head, False)
    for n in range(6):
        # from the third on parts of larger tensors, at other places in them
        packed = torch.randn(2 + n, 4, width)[n:]
        weight = torch.randn(2, 3, 3)
        assert torch.equal(call(packed, weight), by_head(packed, weight))
    kinds = [type(step) for step in steps_of(call)]
    assert kinds.count(recording.Allocation) == 1
    # zeros, the copy, the product and its copy
    assert kinds.count(recording.Operation) == 4
    # of unused, dz, z, heads, the weight and du, one each
    assert kinds.count(recording.View) == 6


def test_results_that_share_memory_are_counted_as_one():
    """Autograd is to find that what it saved of one was written to by the other; of an argument's parts too."""

    def halves(x):
        return (*(x * 2).chunk(2), x[1:])

    call = replay.replayed(halves, False)
    for _ in range(4):
        x = torch.randn(4, 3)
        with torch.no_grad():
            first, second, rest = call(x)
        assert all(torch.equal(a, b) for a, b in zip((first, second, rest), halves(x), strict=True))
        before = first._version, x._version
        second.zero_()
        rest.zero_()
        assert (first._version, x._version) == (before[0] + 1, before[1] + 1)


def test_a_result_alone_in_its_memory_is_a_view_too():
    def turned(x):
        return (x * 2).flatten(1).t()

    call = replay.replayed(turned, False)
    for _ in range(4):
        x = torch.randn(4, 3, 2)
        assert torch.equal(call(x), turned(x))
    assert [type(step) for step in steps_of(call)] == [recording.Operation, recording.View]


def test_views_that_are_told_by_more_than_their_place_stay_operations():
    def looked_at(x):
        return x.conj() * 2, x.conj().imag + 1, x.real.view(torch.int32) + 1

    call = replay.replayed(looked_at, False)
    for _ in range(4):
        x = torch.randn(4, 3, dtype=torch.complex64)
        assert all(torch.equal(a, b) for a, b in zip(call(x), looked_at(x), strict=True))
