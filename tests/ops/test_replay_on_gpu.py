"""Linear recurrences on a GPU from the third call on, when what was recorded is replayed, bit for bit the same."""

import threading

import pytest
import torch

import holdfast
from holdfast.kernels import select as planning
from holdfast.kernels.runtime.replay import replay
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from parity import leaves

pytestmark = pytest.mark.gpu
MATRIX = [name for name, recurrence in RECURRENCES.items() if recurrence.family == "matrix"]
OPS = MATRIX + [name for name, recurrence in RECURRENCES.items() if recurrence.family == "diagonal"]
every_op = pytest.mark.parametrize("name", OPS)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def example(name, seed, dtype, T=130):
    return RECURRENCES[name].example(Draw(seed, dtype, "cuda"), Sizes(B=2, T=T, H=4, K=64, V=64, D=64))


def results(name, arguments, grad):
    given = leaves(arguments)
    for x in given:
        x.requires_grad_(grad)
    o, state = getattr(holdfast, name)(**arguments, output_final_state=True)
    made = leaves([o, state])
    if not grad:
        return made
    return [*made, *torch.autograd.grad(sum(x.float().square().sum() for x in made), given)]


def replays():
    return [x for known in planning._CACHES for x in known.values() if isinstance(x, replay.Replay)]


@every_op
@dtypes
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients"])
def test_a_replay_equals_the_call(name, dtype, grad):
    planning.forget()
    examples = [example(name, seed, dtype) for seed in range(6)]
    with replay.disabled():
        expected = [results(name, arguments, grad) for arguments in examples]
    assert not replays()
    for arguments, right in zip(examples, expected, strict=True):
        for x, y in zip(results(name, arguments, grad), right, strict=True):
            assert torch.equal(x, y)
    assert replays()


@pytest.mark.parametrize("name", [name for name in MATRIX if name != "mlstm"])
def test_a_replayed_step_equals_the_call(name):
    planning.forget()
    for seed in range(5):
        arguments = example(name, seed, torch.bfloat16, T=1)
        state = arguments.pop("initial_state")
        other = state.clone()
        with replay.disabled():
            right = holdfast.step(name, arguments, other)
        version = state._version
        assert torch.equal(holdfast.step(name, arguments, state), right)
        assert torch.equal(state, other)
        assert state._version > version
    assert replays()


def test_on_another_stream_thread_and_in_a_graph():
    arguments = example("simple_gla", 0, torch.bfloat16)
    for _ in range(3):
        right, _ = holdfast.simple_gla(**arguments)
    torch.cuda.synchronize()
    found = []
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        found.append(holdfast.simple_gla(**arguments)[0])
    side.synchronize()
    thread = threading.Thread(target=lambda: found.append(holdfast.simple_gla(**arguments)[0]))
    thread.start()
    thread.join()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.append(holdfast.simple_gla(**arguments)[0])
    found[-1].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(o, right) for o in found)


def test_memory_beside_the_results_is_given_back_in_between():
    """As much as the call takes that is not replayed."""
    peaks = []
    planning.forget()
    for _ in range(4):
        arguments = example("gated_delta_rule", 0, torch.bfloat16, T=4096)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results("gated_delta_rule", arguments, True)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[3] <= peaks[0]
