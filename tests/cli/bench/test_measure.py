"""Right results get a time, wrong ones do not, and whatever fails is a row."""

from dataclasses import replace

import pytest
import torch

from holdfast.cli.bench.case import Case, checked
from holdfast.cli.bench.clock import bound_by_host
from holdfast.cli.bench.floor import floor_bytes
from holdfast.cli.bench.measure import lost, measure
from holdfast.cli.bench.memory import extra_bytes
from holdfast.cli.bench.peers import PEERS, Peer
from holdfast.cli.bench.subject import HoldfastRunner, Subject, holdfast_runners
from holdfast.cli.bench.workload import workloads
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.ops import matrix

CPU = torch.device("cpu")
GLA = Case("simple_gla", (("B", 1), ("T", 40), ("H", 2), ("K", 8), ("V", 4)), "float32", "fwd+bwd")
SIZES = {"B": 2, "T": 40, "G": 3, "H": 1, "K": 8, "V": 8, "D": 8, "C": 16, "N": 4}


class Broken(Chunked):
    """chunked, with one result scaled."""

    def __init__(self, name: str, output: float = 1.0, gradient: float = 1.0) -> None:
        self.name, self.output, self.gradient = name, output, gradient

    def forward(self, plan, call, cu_seqlens):
        o, state = super().forward(plan, call, cu_seqlens)
        return o * self.output, state

    def backward(self, plan, call, cu_seqlens, grad_o, grad_final):
        grads, grad_state = super().backward(plan, call, cu_seqlens, grad_o, grad_final)
        grads[0] = grads[0] * self.gradient
        return grads, grad_state


def case_of(op: str, passes: str = "fwd+bwd", dtype: str = "float32") -> Case:
    axes = workloads()[op].required
    return Case(op, tuple((axis, SIZES[axis]) for axis in axes), dtype, passes)


@pytest.mark.parametrize("op", workloads())
def test_every_backend_of_every_op_is_measured(op, roof):
    for runner in holdfast_runners(case_of(op)):
        row = measure(case_of(op), runner, CPU, roof)
        if row.status == "rejected":
            # a GPU's kernel; the two that every op has on a CPU do not get away with this
            assert "GPU" in row.detail
            assert runner.name not in ("holdfast chunked", "holdfast loop", "holdfast reference")
            continue
        assert (row.status, row.detail) == ("ok", "")
        assert row.error < row.limit
        assert row.low_ms <= row.median_ms <= row.high_ms
        assert row.floor_ratio == pytest.approx(row.median_ms / (floor_bytes(case_of(op)) / 1e9 * 1e3))


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (Broken("broken", output=1.001), "relative error 1.0e-03 of the output, limit 1.0e-04"),
        (Broken("broken", gradient=1.001), "relative error 1.0e-03 of the gradient 1, limit 1.0e-04"),
        (Broken("broken", output=torch.nan), "relative error nan of the output"),
    ],
)
def test_a_wrong_backend_gets_no_time(monkeypatch, roof, backend, said):
    monkeypatch.setattr(matrix, "BACKENDS", (*matrix.BACKENDS, backend))
    row = measure(GLA, HoldfastRunner("broken"), CPU, roof)
    assert row.status == "wrong"
    assert row.detail.startswith(said)
    assert (row.median_ms, row.host_ms, row.memory_bytes, row.floor_ratio) == (None,) * 4


@pytest.mark.parametrize(("error", "status"), [(1e-4, "ok"), (1.01e-4, "wrong")])
def test_what_is_just_within_the_limit_is_right(error, status, monkeypatch, roof):
    monkeypatch.setattr("holdfast.cli.bench.measure._compare", lambda *rest: (error, "output", []))
    assert measure(GLA, HoldfastRunner("chunked"), CPU, roof).status == status


def test_a_wrong_gradient_does_not_matter_forward(monkeypatch, roof):
    monkeypatch.setattr(matrix, "BACKENDS", (*matrix.BACKENDS, Broken("broken", gradient=1.001)))
    assert measure(replace(GLA, passes="fwd"), HoldfastRunner("broken"), CPU, roof).status == "ok"


def test_what_fails_only_at_full_size_gets_no_time(roof):
    class Overflows:
        name = "overflows"

        def prepare(self, case, device):
            inputs = case.arguments(device)
            bad = torch.inf if dict(case.sizes)["T"] > 256 else 1.0
            return Subject(inputs, lambda a: case.work.exact(a, {}) * bad, lambda a: case.work.exact(a, {}))

    case = Case("rglru", (("B", 2), ("T", 2**13), ("D", 2**10)), "float32", "fwd")
    assert dict(checked(case, CPU).sizes) == {"B": 2, "T": 4096, "D": 1024}
    small = Case("rglru", (("B", 2), ("T", 300), ("D", 4)), "float32", "fwd")
    assert checked(small, CPU) == small
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.cli.bench.case.ORACLE_BUDGET", {"cpu": 2000})
        row = measure(small, Overflows(), CPU, roof)
    assert row.checked_at == {"B": 1, "T": 256, "D": 4}
    assert (row.status, row.median_ms) == ("wrong", None)
    assert "finite" in row.detail


def test_what_is_too_long_for_the_steps_is_compared_in_full_with_the_pytorch_backend(monkeypatch, roof):
    from holdfast.cli.bench import case as cases

    monkeypatch.setattr(matrix, "BACKENDS", (*matrix.BACKENDS, Broken("broken", gradient=1.001)))
    long = GLA.with_sizes(dict(GLA.sizes) | {"T": 600})
    monkeypatch.setattr(cases, "ORACLE_BUDGET", {"cpu": 2000})
    monkeypatch.setattr(cases, "IN_CHUNKS_BUDGET", {"cpu": 2**20})
    assert checked(long, CPU) != long
    row = measure(long, HoldfastRunner("reference"), CPU, roof)
    assert (row.status, row.checked_at, row.checked_by) == ("ok", dict(long.sizes), "chunked")
    row = measure(long, HoldfastRunner("broken"), CPU, roof)
    assert (row.status, row.detail) == ("wrong", "relative error 1.0e-03 of the gradient 1, limit 1.0e-04")
    # another function, so not what the op's backend says
    row = measure(long, next(peer for peer in PEERS if peer.name == "torch SDPA"), CPU, roof)
    assert (row.status, row.checked_at, row.checked_by) == ("ok", dict(checked(long, CPU).sizes), "")


def test_a_refusing_backend_is_a_row_with_its_reason(monkeypatch, roof):
    class Elsewhere(Chunked):
        name = "elsewhere"

        def reject(self, problem, device):
            return "needs a Hopper GPU"

    monkeypatch.setattr(matrix, "BACKENDS", (*matrix.BACKENDS, Elsewhere()))
    row = measure(GLA, HoldfastRunner("elsewhere"), CPU, roof)
    assert (row.status, row.detail, row.median_ms) == ("rejected", "needs a Hopper GPU", None)


def test_a_raising_runner_is_a_row(roof):
    class Raises:
        name = "raises"

        def prepare(self, case, device):
            raise RuntimeError("compiler\n  crashed")

    row = measure(GLA, Raises(), CPU, roof)
    assert (row.status, row.detail) == ("failed", "RuntimeError: compiler crashed")


def test_a_peer_that_is_not_installed_is_a_row(roof, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fla", None)
    row = measure(GLA, Peer("fla chunk", "fla", "chunk", needs_gpu=False), CPU, roof)
    assert row.status == "missing"
    assert "fla" in row.detail


@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer.needs_gpu], ids=lambda peer: peer.name)
def test_a_gpu_peer_says_so_on_a_cpu(peer, roof):
    row = measure(case_of(peer.ops[0]), peer, CPU, roof)
    assert (row.status, row.detail) == ("rejected", "needs an NVIDIA GPU")


@pytest.mark.parametrize("passes", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize(
    ("name", "op"),
    [(peer.name, op) for peer in PEERS if not peer.needs_gpu and peer.ops for op in peer.ops],
)
def test_a_peer_that_runs_on_a_cpu_is_right(name, op, passes, roof):
    peer = next(peer for peer in PEERS if peer.name == name)
    case = case_of(op, passes)
    case = case if op != "intra_chunk" else case.with_sizes(dict(case.sizes) | {"T": 48})
    row = measure(case, peer, CPU, roof)
    assert (row.status, row.detail) == ("ok", "")
    assert row.median_ms > 0


def test_the_compiled_loop_refuses_long_sequences(roof):
    case = Case("rglru", (("B", 1), ("T", 9), ("D", 4)))
    row = measure(case, Peer("compiled", "compiled_loop", needs_gpu=False), CPU, roof)
    assert row.status == "rejected"
    assert "up to 8 steps" in row.detail


def test_torch_nn_has_no_heads(roof):
    case = Case("lstm", (("B", 1), ("T", 4), ("H", 2), ("D", 4)))
    row = measure(case, Peer("torch.nn", "torch_nn", needs_gpu=False), CPU, roof)
    assert (row.status, row.detail) == ("rejected", "has no heads: H must be 1")


def test_cuda_graphs_need_a_gpu(roof):
    row = measure(GLA, HoldfastRunner("chunked"), CPU, roof, "graph")
    assert row.status == "failed"
    assert "need an NVIDIA GPU" in row.detail


def test_floor_bytes_by_hand():
    # q, k: 2 x 40 x 8 a head; v, o: 2 x 40 x 4; bfloat16. g: 2 x 40 in float32.
    forward = replace(GLA, dtype="bfloat16", passes="fwd")
    inputs = (2 * 2 * 40 * 8 + 2 * 40 * 4) * 2 + 2 * 40 * 4
    output = 2 * 40 * 4 * 2
    assert floor_bytes(forward) == inputs + output
    assert floor_bytes(replace(forward, passes="fwd+bwd")) == 3 * inputs + 2 * output


def test_floor_bytes_of_an_lstm_by_hand():
    case = Case("lstm", (("B", 3), ("T", 5), ("H", 2), ("D", 4)), "float32")
    # x has four gates, the output one; R and b count once
    assert floor_bytes(case) == 4 * (3 * 5 * 4 * 2 * 4 + 4 * 2 * 4 * 4 + 4 * 2 * 4 + 3 * 5 * 2 * 4)


@pytest.mark.parametrize(
    ("op", "sizes", "dtype", "passes", "said"),
    [
        ("glaa", {}, "float32", "fwd", "op: expected one of"),
        ("gla", {"B": 1, "T": 2}, "float32", "fwd", "missing H, K, V"),
        ("rglru", {"B": 1, "T": 2, "D": 4, "H": 1}, "float32", "fwd", "axes B, T, D, gate_bits; got 'H'"),
        ("rglru", {"B": 1, "T": 0, "D": 4}, "float32", "fwd", "expected T >= 1"),
        ("rglru", {"B": 1, "T": 2, "D": 4}, "int8", "fwd", "dtype: expected one of"),
        ("rglru", {"B": 1, "T": 2, "D": 4}, "float32", "bwd", "pass: expected one of"),
    ],
)
def test_a_bad_case_is_a_value_error(op, sizes, dtype, passes, said):
    with pytest.raises(ValueError, match=said):
        Case(op, tuple(sizes.items()), dtype, passes)


def test_runners_of_a_case_get_the_same_arguments(roof):
    first = GLA.arguments(CPU)
    assert measure(GLA, HoldfastRunner("chunked"), CPU, roof).status == "ok"
    second = GLA.arguments(CPU)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(x.requires_grad for x in second.values())
    # another layout of them, after a pass with gradients
    assert measure(GLA, next(peer for peer in PEERS if peer.name == "torch SDPA"), CPU, roof).status == "ok"


@pytest.mark.parametrize(
    ("median", "host", "bound"), [(1.0, 0.6, True), (1.0, 0.4, False), (None, 0.4, False), (1.0, None, False)]
)
def test_a_row_whose_host_takes_over_half_of_its_time_is_bound_by_it(median, host, bound):
    assert bool(bound_by_host(median, host)) == bound


def test_a_device_is_lost_when_it_cannot_be_waited_for(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("free"))
    assert (lost(CPU), done) == ("", [])
    assert (lost(torch.device("cuda")), done) == ("", ["wait", "free"])

    def raises(device):
        raise RuntimeError("an illegal\nmemory access")

    monkeypatch.setattr(torch.cuda, "synchronize", raises)
    assert lost(torch.device("cuda")) == "RuntimeError: an illegal memory access"


def test_on_a_gpu_memory_is_the_peak_of_the_run_less_what_was_there(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: done.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: done.append("before") or 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: done.append("peak") or 350)
    assert extra_bytes(lambda: done.append("run"), torch.device("cuda")) == 250
    assert done == ["wait", "reset", "before", "run", "wait", "peak"]


@pytest.mark.gpu
@pytest.mark.parametrize(("method", "bound"), [("events", True), ("events", False), ("graph", False)])
def test_a_gpu_is_timed_by_events_or_replays(method, bound, roof, monkeypatch):
    # whose time is longer depends on what else the machine does
    monkeypatch.setattr("holdfast.cli.bench.clock.bound_by_host", lambda median, host: bound)
    row = measure(replace(GLA, passes="fwd"), HoldfastRunner("chunked"), torch.device("cuda"), roof, method)
    assert (row.status, row.detail) == ("ok", "")
    assert ("replay" in row.method) == (bound or method == "graph")
    assert row.memory_bytes > 0
    assert row.host_ms > 0
