"""Calls that are recorded and replayed: the same results on other tensors, and none replayed that may not be."""

import ctypes
import threading
import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch

import holdfast
from holdfast.kernels import varlen
from holdfast.kernels.runtime.replay import guard, recording, replay
from holdfast.kernels.runtime.replay.refusals import refusals

pytestmark = pytest.mark.usefixtures("on_this_machine")
CPU = torch.device("cpu")


class Copies:
    """In place of a compiled kernel: copies `count` floats from one address to another and adds a number."""

    places = ((0, None), (1, None), (2, None), (3, None))

    def __call__(self, grid, arguments, constants=()):
        self.start(grid, [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments])

    def bound(self, grid, values):
        return partial(self.start, grid, tuple(values))

    def start(self, grid, values):
        source, target, count, number = values
        read, write = ((ctypes.c_float * count).from_address(x) for x in (source, target))
        for n in range(count):
            write[n] = read[n] + number


COPIES = Copies()


def add_by_kernel(x, out, number):
    arguments = (x, out, x.numel(), number)
    recording.note_launch(COPIES, (1, 1, 1), arguments)
    COPIES((1, 1, 1), arguments)


class Counted:
    """A function of tensors, and how often it ran."""

    def __init__(self, function, above_autograd=True):
        self.runs = 0

        def run(*arguments, **named):
            self.runs += 1
            return function(*arguments, **named)

        self.call = replay.replayed(run, above_autograd)

    def __call__(self, *arguments, **named):
        return self.call(*arguments, **named)


def stages(x, bias=None, number=1.0):
    """A kernel between operations, on views, with memory of its own."""
    y = torch.empty_like(x)
    add_by_kernel(x, y, number)
    z = x.new_empty(2, x.numel(), dtype=torch.float32)
    add_by_kernel(y, z[1], 2 * number)
    z[0].fill_(3.0)
    out = z.sum(0).view(x.shape)
    return [out if bias is None else out + bias, None], y.t()


def test_a_replay_equals_the_call_on_other_tensors():
    counted = Counted(stages)
    for n in range(6):
        x, bias = torch.randn(4, 5), torch.randn(5)
        (out, nothing), turned = counted(x, bias=bias)
        (expected, _), expected_turned = stages(x, bias=bias)
        assert torch.equal(out, expected)
        assert torch.equal(turned, expected_turned)
        assert nothing is None
        assert turned.stride() == expected_turned.stride()
        assert counted.runs == min(n + 1, 2)


@pytest.mark.parametrize("below", [False, True])
def test_views_and_copies_that_operations_may_make(below):
    """contiguous and reshape return their argument, a view of it or a copy; below autograd they are seen themselves."""

    def laid_out(x):
        made = []
        for y in (x, x.t(), x[1:], x[:, 1:].t()):
            for z in (y.contiguous(), y.reshape(-1), y.to(torch.float32)):
                z = z if z.is_contiguous() else z.clone(memory_format=torch.contiguous_format)
                made.append(torch.empty_like(z))
                add_by_kernel(z, made[-1], 1.0)
        return made

    counted = Counted(laid_out)
    kept = []
    for _ in range(6):
        x = torch.randn(4, 5)
        with torch._C._AutoDispatchBelowAutograd() if below else nullcontext():
            made = counted(x)
        # so that memory is found elsewhere each time
        kept += [x, *made]
        for got, right in zip(made, laid_out(x), strict=True):
            assert torch.equal(got, right)
    assert counted.runs == 2


def doubled(times):
    def run(x):
        for _ in range(times):
            x = x * 2.0 - x
        return x

    return Counted(run)


def test_a_loop_is_recorded_in_time_that_grows_with_its_steps(monkeypatch):
    monkeypatch.setattr(recording, "MOST_STEPS", 20_000)
    seconds = []
    for times in (500, 8000):
        counted, x = doubled(times), torch.randn(3)
        counted(x)
        start = time.perf_counter()
        counted(x)
        seconds.append(time.perf_counter() - start)
        assert torch.equal(counted(x), x)
        assert counted.runs == 2
    # 16 times the steps: 256 times what goes over all of them for each, which took 100 times as long in all
    assert seconds[1] <= 50 * seconds[0]


def test_a_longer_loop_runs_in_full_and_keeps_nothing(monkeypatch):
    monkeypatch.setattr(recording, "MOST_STEPS", 40)
    held, true = [], recording.Recorder.fail

    def fail(self, reason):
        held.append(len(self.tensors))
        true(self, reason)
        held.append(len(self.tensors))

    monkeypatch.setattr(recording.Recorder, "fail", fail)
    counted, x = doubled(50), torch.randn(3)
    assert all(torch.equal(counted(x), x) for _ in range(4))
    assert counted.runs == 4
    assert held[:2] == [42, 1]
    assert refusals() == {("run", "it takes more than 40 steps"): 1}


def test_at_addresses_that_come_again():
    counted = Counted(lambda x, out: add_by_kernel(x, out, 2.0))
    x, out, others = torch.zeros(4, 5), torch.zeros(4, 5), torch.zeros(6, 4, 5)
    for n in range(6):
        x.fill_(n)
        counted(x, out)
        assert torch.equal(out, x + 2)
        counted(x, others[n])
        assert torch.equal(others[n], x + 2)
    assert counted.runs == 2
    (found,) = {id(x): x for x in replay_of(counted.call).values()}.values()
    ((launch, _),) = found.steps
    assert sum(map(callable, launch.known.values())) == 1


def test_results_are_not_shared_between_calls():
    counted = Counted(stages)
    x = torch.randn(4, 5)
    results = [counted(x)[0][0] for _ in range(5)]
    results[4].zero_()
    assert all(torch.equal(results[0], y) for y in results[1:4])


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x[:3],
        lambda x: x.double(),
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x.flatten(), x.flatten()])[1:21].view(4, 5),
        lambda x: x.clone().requires_grad_(),
        lambda x: torch._neg_view(x),
        lambda x: x.as_subclass(Tagged),
    ],
    ids=["shape", "dtype", "strides", "alignment", "gradient", "negation", "subclass"],
)
def test_what_differs_is_not_replayed(other):
    counted = Counted(lambda x: x * 2)
    x = torch.randn(4, 5)
    for _ in range(3):
        counted(x)
    assert counted.runs == 2
    y = other(x)
    assert torch.equal(counted(y), y * 2)
    assert counted.runs == 3


def test_numbers_names_and_options_decide_too():
    counted = Counted(lambda x, scale=1.0, name="a": x * scale)
    x = torch.randn(3)
    for _ in range(3):
        assert torch.equal(counted(x, scale=2.0), x * 2)
    assert torch.equal(counted(x, scale=3.0), x * 3)
    assert torch.equal(counted(x, 4.0), x * 4)
    assert torch.equal(counted(x, scale=2.0, name="b"), x * 2)
    assert counted.runs == 5


@pytest.mark.parametrize(
    "reads",
    [lambda x: x * x.sum().item(), lambda x: x[x > 0], lambda x: x + torch.rand_like(x)],
    ids=["a value", "a shape from values", "random numbers"],
)
def test_what_depends_on_values_is_never_replayed(reads):
    counted = Counted(reads)
    for n in range(4):
        counted(torch.randn(8))
        assert counted.runs == n + 1


def test_packed_sequences_are_never_replayed():
    counted = Counted(lambda x, offsets: x[varlen.sequence_bounds(offsets, 4)[1] :])
    for n in range(5):
        x = torch.randn(4)
        assert torch.equal(counted(x, torch.tensor([0, n, 4])), x[n:])
    assert counted.runs == 5


def test_tensors_from_elsewhere_are_not_kept():
    elsewhere = torch.randn(3)
    counted = Counted(lambda x: x + elsewhere)
    for n in range(4):
        counted(torch.randn(3))
        assert counted.runs == n + 1


def test_a_launch_that_cannot_be_recorded_runs_each_time():
    def launches(x):
        recording.note_launch(lambda *_: None, (1, 1, 1), (x,))
        return x + 1

    counted = Counted(launches)
    for n in range(4):
        counted(torch.randn(3))
        assert counted.runs == n + 1


def test_one_tensor_as_two_arguments():
    counted = Counted(lambda x, y: x - 2 * y)
    x, y = torch.randn(3), torch.randn(3)
    for _ in range(4):
        assert torch.equal(counted(x, x), -x)
    for _ in range(4):
        assert torch.equal(counted(x, y), x - 2 * y)
    assert torch.equal(counted(y, y), -y)


def test_what_is_written_to_is_seen_by_autograd():
    def changes(x, state):
        add_by_kernel(x, state, 1.0)
        torch.autograd.graph.increment_version([state])
        return x + 0

    counted = Counted(changes)
    for _ in range(4):
        x, state = torch.randn(3), torch.zeros(3)
        counted(x, state)
        assert torch.equal(state, x + 1)
        assert state._version == 1
    assert counted.runs == 2


def test_only_what_is_read_is_written_again():
    def run(x, state):
        made, spare, seen = torch.empty(2, 3), torch.empty(3), torch.empty(3)
        spare.zero_()
        made[0].fill_(2.0)
        made.view(-1)[3:].copy_(x)
        seen.fill_(1.0)
        out = torch.empty(3)
        add_by_kernel(seen, out, 1.0)
        seen.fill_(5.0)
        state[1:].add_(1)
        return made, out

    counted = Counted(run)
    state = torch.zeros(4)
    for n in range(5):
        x = torch.randn(3)
        made, out = counted(x, state)
        assert torch.equal(made, torch.stack([torch.full((3,), 2.0), x]))
        assert torch.equal(out, torch.full((3,), 2.0))
        assert state.tolist() == [0, n + 1, n + 1, n + 1]
    (found,) = {id(x): x for x in replay_of(counted.call).values()}.values()
    names = [step.op._schema.name for step, _ in found.steps if hasattr(step, "op")]
    assert names.count("aten::fill_") == 2
    assert "aten::zero_" not in names


def test_errors_stay_errors():
    def refuses(x):
        raise ValueError("x: expected something else")

    counted = Counted(refuses)
    for _ in range(4):
        with pytest.raises(ValueError, match="expected something else"):
            counted(torch.randn(3))
    assert not recording.RECORDING


def test_memory_in_between_is_given_back():
    def chain(x):
        for _ in range(4):
            y = torch.empty_like(x)
            add_by_kernel(x, y, 1.0)
            x = y
        return x

    call = replay.replayed(chain)
    for _ in range(2):
        call(torch.randn(3))
    (found,) = replay_of(call).values()
    held = []
    look = lambda slots: held.append(sum(x is not None for x in slots))  # noqa: E731
    found.steps = [part for step in found.steps for part in (step, (look, []))]
    x = torch.randn(3)
    assert torch.allclose(call(x), x + 4)
    # the argument, what a launch reads and what it writes
    assert max(held) == 3


def test_replays_with_memory_in_one_equal_the_call():
    def run(x):
        parts = [x]
        for n in range(5):
            parts.append(torch.empty_like(x))
            add_by_kernel(parts[-2], parts[-1], float(n))
        seen = torch.empty_like(x)
        add_by_kernel(parts[2], seen, 0.5)
        return parts[-1], seen * 2

    counted = Counted(run)
    for n in range(5):
        x = torch.randn(4, 5)
        got, right = counted(x), run(x)
        assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))
        assert counted.runs == min(n + 1, 2)


def replay_of(call):
    (known,) = [x.cell_contents for x in call.__closure__ if isinstance(x.cell_contents, dict)]
    return known


def test_disabled_calls_run_in_full_on_every_thread():
    counted, x = Counted(lambda x: x * 2), torch.randn(3)
    for _ in range(3):
        counted(x)
    assert counted.runs == 2
    with replay.disabled(), replay.disabled():
        counted(x)
        thread = threading.Thread(target=lambda: counted(x))
        thread.start()
        thread.join()
        assert torch.equal(counted(x), x * 2)
    assert counted.runs == 5
    counted(x)
    assert counted.runs == 5


def test_a_failure_enables_replays_again():
    def fail():
        raise KeyError

    with pytest.raises(KeyError), replay.disabled():
        fail()
    test_a_replay_equals_the_call_on_other_tensors()


def test_disabled_calls_are_not_recorded():
    counted, x = Counted(lambda x: x * 2), torch.randn(3)
    with replay.disabled():
        for _ in range(4):
            counted(x)
    assert not replay_of(counted.call)
    for _ in range(4):
        counted(x)
    assert counted.runs == 6


def test_replays_without_pytorchs_own_check(monkeypatch):
    """A version of PyTorch may have another one."""
    assert guard.tensor_check is not None
    monkeypatch.setattr(guard, "tensor_check", None)
    test_a_replay_equals_the_call_on_other_tensors()
    test_numbers_names_and_options_decide_too()


def test_under_autograd_a_gradient_is_recorded_each_time():
    counted = Counted(lambda x: x * 2)
    x = torch.randn(3, requires_grad=True)
    for _ in range(3):
        assert counted(x).requires_grad
    with torch.no_grad():
        for _ in range(4):
            assert not counted(x).requires_grad
    assert counted.runs == 5
    assert counted(x).requires_grad


def test_a_gradient_is_recorded_after_replays_without():
    """Of tensors that need one: what was recorded where gradients are off is not replayed where they are on."""
    counted = Counted(lambda x, y: x * y)
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    for _ in range(4):
        with torch.no_grad():
            assert not counted(x, y).requires_grad
    assert counted.runs == 2
    assert counted(x, y).requires_grad
    assert counted.runs == 3


def test_in_inference_mode():
    counted = Counted(stages)
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn(4, 5)
            assert torch.equal(counted(x)[0][0], stages(x)[0][0])
            assert counted(x)[0][0].is_inference()


def test_what_watches_operations_sees_them():
    from torch.utils.flop_counter import FlopCounterMode

    counted = Counted(lambda x: x @ x)
    x = torch.randn(8, 8)
    for _ in range(3):
        counted(x)
    with FlopCounterMode(display=False) as counter:
        counted(x)
    assert counter.get_total_flops() == 2 * 8**3
    assert torch.equal(torch.vmap(counted)(torch.stack([x, x]))[0], x @ x)
    with torch.autocast("cpu", torch.bfloat16):
        assert counted(x).dtype == torch.bfloat16
    assert torch.equal(torch.compile(counted.call, backend="eager", fullgraph=True)(x), x @ x)


@pytest.mark.parametrize("backend", ["loop", "reference"])
def test_resets_read_on_the_host_are_not_replayed(backend):
    """Which rows are zeroed is a matter of their values, not of their shape."""
    x, R = torch.randn(2, 4, 1, 1, 3), torch.randn(1, 1, 3, 3)
    for n in range(6):
        reset = torch.zeros(2, 4, dtype=torch.bool)
        reset[n % 2, 1 + n % 3] = True
        with torch.no_grad():
            got, _ = holdfast.elman(x, R, reset=reset, backend=backend)
            at = 1 + n % 3
            alone, _ = holdfast.elman(x[:, at:], R, backend=backend)
        torch.testing.assert_close(got[n % 2, at:], alone[n % 2])


@pytest.mark.parametrize(
    "of_storage",
    [
        lambda x: x.as_strided((2, 2), (2, 1), x.storage_offset()) * 1,
        lambda x: x[1:].as_strided((2,), (1,), x.storage_offset() + 1) * 1,
        lambda x: torch.view_as_complex(x.clone() if x.storage_offset() % 2 else x).real * 1,
    ],
    ids=["as_strided", "of a view", "view_as_complex"],
)
def test_what_depends_on_the_place_in_a_storage_is_not_replayed(of_storage):
    counted, memory = Counted(of_storage), torch.randn(64)
    # addresses of one alignment, at other places in their storages
    begin = (-memory.data_ptr() // 4) % 4
    for n in range(6):
        whole = memory[begin:].clone() if n % 2 else memory
        start = 0 if n % 2 else begin + 4 * n
        x = whole[start : start + 8].view(4, 2)
        assert torch.equal(counted(x), of_storage(x))
    counted = Counted(lambda x: torch.empty(4).fill_(2.0).as_strided((2,), (2,), 1) * x[:2])
    for _ in range(4):
        x = torch.randn(2)
        assert torch.equal(counted(x), 2 * x)
    assert counted.runs == 2


def test_an_encoded_address_outlives_the_others():
    """Another thread may empty what is remembered while this one encodes."""

    class Emptied(dict):
        """Whatever is put into it another thread takes out at once."""

        def __setitem__(self, key, value):
            pass

    assert recording._remembered(Emptied(), 5000, lambda address: b"made") == b"made"
