"""Packed sequences as the host sorts them, by hand; what it reads cannot be captured in a CUDA graph, and says so."""

from types import SimpleNamespace

import pytest
import torch

from holdfast.kernels.dense.cuda.varlen import groups
from holdfast.kernels.dense.torch import time_loop as loop
from holdfast.kernels.dense.varlen_schedule import make_schedule
from holdfast.kernels.diagonal.boundary_states import BoundarySteps
from holdfast.kernels.varlen import buckets, on_device, sequence_bounds

CPU = torch.device("cpu")


@pytest.fixture
def capturing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_offsets_are_not_read_in_a_capture(capturing):
    assert sequence_bounds(torch.tensor([0, 3, 5]), 5) == [0, 3, 5]
    with pytest.raises(RuntimeError, match="cu_seqlens: its offsets are read on the host"):
        sequence_bounds(SimpleNamespace(is_cuda=True), 5)


def test_offsets_on_the_host_are_not_copied_in_a_capture(capturing):
    bounds, gpu = torch.tensor([0, 3, 5]), torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match=r"cu_seqlens: expected offsets on cuda:0, .*; got offsets on cpu"):
        on_device(bounds, 5, gpu)
    with pytest.raises(RuntimeError, match=r"cu_seqlens: .*; got a backend that groups the sequences on the host"):
        buckets([0, 3, 5], gpu)
    with pytest.raises(RuntimeError, match=r"cu_seqlens: .*; got offsets on cpu"):
        BoundarySteps.of(bounds, 5, gpu)
    with pytest.raises(RuntimeError, match=r"cu_seqlens: .*; got offsets on cpu"):
        make_schedule(1, 5, bounds, gpu)
    with pytest.raises(RuntimeError, match=r"cu_seqlens: .*; got offsets on cpu"):
        groups(bounds, 5, 4, gpu)
    # a call of CPU tensors captures nothing
    assert on_device(bounds, 5, CPU).equal(bounds)
    assert len(buckets([0, 3, 5], CPU)) == 2


def test_the_step_loop_does_not_read_resets_in_a_capture(capturing):
    call = SimpleNamespace(reset=SimpleNamespace(is_cuda=True))
    with pytest.raises(RuntimeError, match="reset: this backend reads it on the host"):
        loop._resets(call, None)


# of lengths 2, 0, 3, 1, 3
BOUNDS = torch.tensor([0, 2, 2, 5, 6, 9])
TOKENS = torch.arange(9)[None]


def test_first_and_last_steps_of_sequences():
    x, states = torch.arange(12).view(3, 4), torch.arange(3)
    found = BoundarySteps.of(None, 4, CPU)
    assert (x[found.starts].tolist(), x[found.stops].tolist()) == ([0, 4, 8], [3, 7, 11])
    assert (states[found.members].tolist(), found.packed) == ([0, 1, 2], False)
    found = BoundarySteps.of(BOUNDS, 9, CPU)
    assert (TOKENS[found.starts].tolist(), TOKENS[found.stops].tolist()) == ([0, 2, 5, 6], [1, 4, 5, 8])
    assert (found.members.tolist(), found.packed) == ([0, 2, 3, 4], True)


def test_sequences_of_like_length_run_as_one_batch_filled_up_at_their_beginnings():
    one, two = groups(BOUNDS, 9, 3, CPU)
    # at most three, the longest first
    assert (one.sequences.tolist(), two.sequences.tolist()) == ([2, 4, 0], [3])
    assert one.batch(TOKENS[0]).tolist() == [[2, 3, 4], [6, 7, 8], [0, 0, 1]]
    assert one.inside.tolist() == [[True] * 3, [True] * 3, [False, True, True]]
    assert one.begins.tolist() == [[True, False, False], [True, False, False], [False, True, False]]
    assert one.filled.tolist() == [0, 1, 2, 3, 4, 5, 7, 8]
    assert one.tokens.tolist() == [2, 3, 4, 6, 7, 8, 0, 1]
    assert (two.batch(TOKENS[0]).tolist(), two.tokens.tolist()) == ([[5]], [5])


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        # a half of what a batch takes holds tokens, or the next one is begun
        ((4, 1), [[0, 1]]), ((4, 1, 1), [[0, 1, 2]]), ((8, 1, 1), [[0, 1], [2]]), ((8, 1, 8), [[0, 2, 1]]),
        ((8, 8, 1, 1, 1), [[0, 1, 2, 3], [4]]), ((6, 3, 0, 1, 1), [[0, 1, 3], [4]]), ((0, 0), []),
    ],
)  # fmt: skip
def test_batches_waste_no_more_than_half(lengths, batches):
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    assert [each.sequences.tolist() for each in groups(bounds, sum(lengths), 8, CPU)] == batches


def test_the_schedule_of_a_batch():
    x, time = torch.arange(12).view(3, 4), make_schedule(3, 4, None, CPU)
    assert (time.sizes, time.offsets) == ([3] * 4, [0, 3, 6, 9, 12])
    assert time.rows(x, 1, 3).tolist() == [[1, 5, 9], [2, 6, 10]]
    assert time.rows(x).tolist() == x.T.tolist()
    assert [row.tolist() for row in time.steps(x)] == x.T.tolist()
    put = torch.zeros(3, 4)
    time.put(torch.tensor([1.0, 2, 3, 4, 5, 6]), put, 2, 4)
    assert put.tolist() == [[0, 0, 1, 4], [0, 0, 2, 5], [0, 0, 3, 6]]
    state = torch.arange(6).view(2, 3)
    assert time.enter(state) is state
    assert (time.leave(state).tolist(), time.leave(state) is state) == (state.tolist(), False)
    empty = make_schedule(0, 2, None, CPU)
    assert (empty.sizes, empty.offsets) == ([0, 0], [0, 0, 0])


def test_the_schedule_of_packed_sequences():
    """The longest first, in the caller's order where several are as long."""
    time = make_schedule(1, 9, BOUNDS, CPU)
    assert time.sequences.tolist() == [2, 4, 0, 3, 1]
    assert (time.sizes, time.offsets) == ([4, 3, 2], [0, 4, 7, 9])
    assert time.order.tolist() == [2, 6, 0, 5, 3, 7, 1, 4, 8]
    assert [row.tolist() for row in time.steps(TOKENS)] == [[2, 6, 0, 5], [3, 7, 1], [4, 8]]
    assert time.rows(TOKENS, 1, 3).tolist() == [[3], [7], [1], [4], [8]]
    put = torch.zeros(1, 9)
    time.put(torch.arange(1.0, 6), put, 1, 3)
    assert put.tolist() == [[0, 3, 0, 1, 4, 0, 0, 2, 5]]
    state = torch.arange(5)[None]
    assert time.enter(state).tolist() == [[2, 4, 0, 3, 1]]
    assert time.leave(time.enter(state)).tolist() == state.tolist()
    assert [time.blocks(rows) for rows in (1, 4, 5, 7, 8, 9)] == [
        [(0, 1), (1, 2), (2, 3)], [(0, 1), (1, 2), (2, 3)], [(0, 1), (1, 3)], [(0, 2), (2, 3)], [(0, 2), (2, 3)],
        [(0, 3)],
    ]  # fmt: skip


def test_buckets_are_padded_to_at_most_twice_their_tokens():
    found = buckets([0, 1, 3, 3, 7, 12], CPU)
    assert [each.sequences.tolist() for each in found] == [[0], [1], [3], [4]]
    (two,) = buckets(BOUNDS[[0, 1, 2]].tolist(), CPU)
    assert (two.sequences.tolist(), two.index.tolist(), two.valid.tolist()) == ([0], [[0, 1]], [[True, True]])
    (three,) = buckets([0, 3, 7], CPU)
    assert three.index.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]]
    assert three.valid.tolist() == [[True, True, True, False], [True] * 4]
    packed = torch.arange(1.0, 8)[None]
    assert three.pad(packed).tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert three.pad(packed, -1.0)[0, 3] == -1
    back = torch.zeros(1, 7)
    three.unpad(three.pad(packed), back)
    assert back.tolist() == packed.tolist()


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ([1, 5], "expected offsets from 0 to T = 5; got 1 to 5"),
        ([0, 4], "expected offsets from 0 to T = 5; got 0 to 4"),
        ([0, 3, 2, 5], "expected offsets that do not decrease; got 3 then 2 at 2"),
    ],
)  # fmt: skip
def test_offsets_that_do_not_rise_from_0_to_the_length(bounds, said):
    with pytest.raises(ValueError, match=said):
        sequence_bounds(torch.tensor(bounds), 5)
    assert sequence_bounds(torch.tensor([0, 2, 2, 5]), 5) == [0, 2, 2, 5]
