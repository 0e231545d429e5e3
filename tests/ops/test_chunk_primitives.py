"""inter_chunk_scan and intra_chunk against plain loops, and composed against simple_gla."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import holdfast
from holdfast.recurrences import Draw
from parity import assert_close, cast, relative_error, values_and_grads

B, G, H, K, V, R = 2, 7, 3, 5, 4, 2
KINDS = ["scalar", "vector", "scalar low rank", "vector low rank"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def scan_arguments(kind, dtype=torch.float64, batch=B, chunks=G, sequences=None, seed=0):
    draw = Draw(seed, dtype)
    shape = (batch, chunks, H) if "scalar" in kind else (batch, chunks, H, K)
    arguments = {
        "states": draw.normal(batch, chunks, H, K, V),
        "decay": draw.log_decay(*shape),
        "initial_state": draw.state(sequences or batch, H, K, V),
    }
    if "low rank" in kind:
        arguments["W"] = draw.normal(batch, chunks, H, K, R, scale=0.3)
        arguments["Y"] = draw.normal(batch, chunks, H, K, R, scale=0.3)
    return arguments


def scan_loop(states, decay, initial_state=None, W=None, Y=None):
    """One state after another, in float32 or wider."""
    dtype = torch.promote_types(states.dtype, torch.float32)
    gamma = decay.to(dtype).exp()
    gamma = gamma[..., None, None] if decay.dim() == 3 else gamma[..., None]
    h = torch.zeros_like(states[:, 0], dtype=dtype) if initial_state is None else initial_state
    out = []
    for n in range(states.shape[1]):
        if W is not None:
            h = h - W[:, n].to(dtype) @ (Y[:, n].to(dtype).mT @ h)
        h = gamma[:, n] * h + states[:, n]
        out.append(h)
    return (torch.stack(out, 1) if out else states.to(dtype)), h


def scan(arguments, **options):
    return holdfast.inter_chunk_scan(**arguments, output_final_state=True, **options)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("initial", [True, False])
def test_the_scan_is_the_loop_bit_for_bit(kind, dtype, initial):
    arguments = scan_arguments(kind, dtype)
    if not initial:
        del arguments["initial_state"]
    for x, y in zip(scan(arguments), scan_loop(**arguments), strict=True):
        assert torch.equal(x, y)


@every_kind
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_gradients_of_the_scan(kind, dtype, limit):
    arguments = scan_arguments(kind, dtype)
    exact = values_and_grads(lambda a: scan_loop(**a), cast(arguments, torch.float64))
    assert_close(values_and_grads(scan, arguments), exact, limit)


@every_kind
def test_the_scan_in_half_precision_errs_no_more_than_the_loop(kind):
    arguments = scan_arguments(kind, torch.bfloat16)
    exact = values_and_grads(lambda a: scan_loop(**a), cast(arguments, torch.float64))

    def loop(a):
        h, final = scan_loop(**a)
        return h.bfloat16(), final

    plain = values_and_grads(loop, arguments)
    for mine, theirs, right in zip(values_and_grads(scan, arguments), plain, exact, strict=True):
        assert relative_error(mine, right) <= 2 * relative_error(theirs, right) + 1e-6


@every_kind
@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck_of_the_scan(kind, packed):
    options = {"cu_seqlens": torch.tensor([0, 0, 1, 3])} if packed else {}
    arguments = scan_arguments(kind, batch=1, chunks=3, sequences=3 if packed else None)
    names = list(arguments)
    flat = [x.requires_grad_() for x in arguments.values()]
    assert torch.autograd.gradcheck(lambda *x: scan(dict(zip(names, x, strict=True)), **options), flat)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_packed_scans_equal_separate_ones(kind, dtype):
    cu_seqlens = torch.tensor([0, 0, 2, 6, 7, 7])
    arguments = scan_arguments(kind, dtype, batch=1, sequences=5)
    h, final = scan(arguments, cu_seqlens=cu_seqlens)
    bounds = cu_seqlens.tolist()
    for n, (start, stop) in enumerate(pairwise(bounds)):
        part = {key: x[:, start:stop] for key, x in arguments.items() if key != "initial_state"}
        one, last = scan(part | {"initial_state": arguments["initial_state"][n : n + 1]})
        assert torch.equal(h[:, start:stop], one)
        assert torch.equal(final[n : n + 1], last)


@every_kind
@pytest.mark.parametrize("at", [0, 1, 4, G])
def test_a_scan_may_be_split_anywhere(kind, at):
    arguments = scan_arguments(kind)
    whole, final = scan(arguments)
    cut = {key: x for key, x in arguments.items() if key != "initial_state"}
    first, state = scan({key: x[:, :at] for key, x in cut.items()} | {"initial_state": arguments["initial_state"]})
    second, last = scan({key: x[:, at:] for key, x in cut.items()} | {"initial_state": state})
    assert torch.equal(torch.cat([first, second], 1), whole)
    assert torch.equal(last, final)


@every_kind
@pytest.mark.parametrize("strength", [-50.0, 0.0, -torch.inf])
def test_the_scan_under_any_decay(kind, strength):
    arguments = scan_arguments(kind, torch.float32)
    arguments["decay"] = arguments["decay"].masked_fill(torch.rand(arguments["decay"].shape) < 0.5, strength)
    got = values_and_grads(scan, arguments)
    assert all(torch.isfinite(x).all() for x in got)
    exact = values_and_grads(lambda a: scan_loop(**a), cast(arguments, torch.float64))
    assert_close(got, exact, 2e-5)


def test_no_chunks_return_the_initial_state_and_pass_its_gradient_on():
    arguments = scan_arguments("scalar", chunks=0)
    initial = arguments["initial_state"].requires_grad_()
    h, final = scan(arguments)
    assert h.shape == (B, 0, H, K, V)
    assert torch.equal(final, initial)
    final.sum().backward()
    assert torch.equal(initial.grad, torch.ones_like(initial))


def test_the_final_state_is_wide_and_its_own():
    h, final = scan(scan_arguments("scalar", torch.bfloat16))
    assert h.dtype == torch.bfloat16
    assert final.dtype == torch.float32
    h, final = scan(scan_arguments("scalar", torch.float32))
    kept = final.clone()
    h.zero_()
    assert torch.equal(final, kept)
    assert holdfast.inter_chunk_scan(**scan_arguments("scalar"))[1] is None


def intra_arguments(dtype=torch.float64, length=50, chunk=16, heads=4, grouped=2, seed=0):
    draw = Draw(seed, dtype)
    return {
        "q": draw.normal(B, length, grouped, K),
        "k": draw.normal(B, length, grouped, K),
        "v": draw.normal(B, length, heads, V),
        "g": draw.log_decay(B, length, heads),
        "states": draw.state(B, -(-length // chunk), heads, K, V),
        "gate": draw.normal(B, length, heads, V),
    }


def intra_loop(q, k, v, g=None, states=None, gate=None, chunk_size=16, gate_activation="silu"):
    """Each chunk step by step from the state that enters it."""
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k = (x.to(dtype).repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    decays = [None] * v.shape[1] if g is None else g[..., None, None].to(dtype).exp().unbind(1)
    writes = (k[..., None] * v[..., None, :].to(dtype)).unbind(1)
    out = []
    for t, (decay, write, read) in enumerate(zip(decays, writes, q.unbind(1), strict=True)):
        if t % chunk_size == 0:
            empty = torch.zeros(B, v.shape[2], K, V, dtype=dtype)
            state = empty if states is None else states[:, t // chunk_size].to(dtype)
        if decay is not None:
            state = decay * state
        state = state + write
        out.append(K**-0.5 * torch.einsum("bhkv,bhk->bhv", state, read))
    o = torch.stack(out, 1)
    if gate is not None:
        o = o * (F.silu(gate.to(dtype)) if gate_activation == "silu" else torch.sigmoid(gate.to(dtype)))
    return o


def intra(arguments, chunk_size=16, **options):
    return holdfast.intra_chunk(**{"g": None} | arguments, chunk_size=chunk_size, **options)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
@pytest.mark.parametrize("given", ["", "g", "g states", "g gate", "states gate", "g states gate"])
def test_intra_chunk_matches_the_loop(given, dtype, limit):
    arguments = {key: x for key, x in intra_arguments(dtype).items() if key in ("q", "k", "v", *given.split())}
    exact = values_and_grads(lambda a: intra_loop(**a), cast(arguments, torch.float64))
    assert_close(values_and_grads(intra, arguments), exact, limit)


@pytest.mark.parametrize(("length", "chunk"), [(1, 16), (15, 16), (16, 16), (17, 16), (20, 1), (20, 7), (1100, 64)])
def test_intra_chunk_of_any_length_and_chunk(length, chunk):
    arguments = intra_arguments(length=length, chunk=chunk, heads=2, grouped=2)
    exact = values_and_grads(lambda a: intra_loop(**a, chunk_size=chunk), arguments)
    assert_close(values_and_grads(lambda a: intra(a, chunk), arguments), exact, 1e-9)


def test_intra_chunk_with_a_sigmoid_gate():
    arguments = intra_arguments()
    exact = values_and_grads(lambda a: intra_loop(**a, gate_activation="sigmoid"), arguments)
    assert_close(values_and_grads(lambda a: intra(a, gate_activation="sigmoid"), arguments), exact, 1e-9)


def test_intra_chunk_in_half_precision_errs_no_more_than_the_loop():
    arguments = intra_arguments(torch.bfloat16)
    exact = values_and_grads(lambda a: intra_loop(**a), cast(arguments, torch.float64))
    plain = values_and_grads(lambda a: intra_loop(**a).bfloat16(), arguments)
    for mine, theirs, right in zip(values_and_grads(intra, arguments), plain, exact, strict=True):
        assert relative_error(mine, right) <= 2 * relative_error(theirs, right) + 1e-6


@pytest.mark.parametrize("strength", [-50.0, 0.0])
def test_intra_chunk_under_any_decay(strength):
    arguments = intra_arguments(torch.float32)
    arguments["g"] = arguments["g"].masked_fill(torch.rand(arguments["g"].shape) < 0.5, strength)
    exact = values_and_grads(lambda a: intra_loop(**a), cast(arguments, torch.float64))
    assert_close(values_and_grads(intra, arguments), exact, 2e-5)


def test_intra_chunk_with_a_decay_of_zero():
    arguments = intra_arguments(torch.float32)
    arguments["g"] = arguments["g"].masked_fill(torch.rand(arguments["g"].shape) < 0.5, -torch.inf)
    assert_close([intra(arguments).double()], [intra_loop(**cast(arguments, torch.float64))], 2e-5)
    assert all(torch.isfinite(x).all() for x in values_and_grads(intra, arguments))


def test_gradcheck_of_intra_chunk():
    arguments = {key: x[:1] for key, x in intra_arguments(length=5, chunk=3, heads=2, grouped=1).items()}
    names = list(arguments)
    flat = [x.requires_grad_() for x in arguments.values()]
    assert torch.autograd.gradcheck(lambda *x: intra(dict(zip(names, x, strict=True)), chunk_size=3), flat)


def test_intra_chunk_of_no_tokens():
    arguments = {key: x.requires_grad_() for key, x in intra_arguments(length=0).items()}
    o = intra(arguments)
    assert o.shape == (B, 0, 4, V)
    o.sum().backward()
    assert all(x.grad.shape == x.shape for x in arguments.values())


def test_intra_chunk_does_not_look_ahead():
    arguments, other = intra_arguments(torch.float32), intra_arguments(torch.float32, seed=1)
    for at in (0, 15, 16, 40):
        mixed = {key: torch.cat([x[:, : at + 1], other[key][:, at + 1 :]], 1) for key, x in arguments.items()}
        mixed["states"] = arguments["states"]
        assert torch.equal(intra(mixed)[:, : at + 1], intra(arguments)[:, : at + 1])


@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (200, 64), (128, 32)])
def test_the_two_are_simple_gla(length, chunk):
    draw = Draw(0, torch.float64)
    q, k, v = draw.normal(B, length, H, K), draw.normal(B, length, H, K), draw.normal(B, length, H, V)
    inputs = {"q": q, "k": k, "v": v, "g": draw.log_decay(B, length, H), "initial_state": draw.state(B, H, K, V)}

    def composed(a):
        pad = -length % chunk
        g, k, v = (
            F.pad(x, (0, 0) * (x.dim() - 2) + (0, pad)).unflatten(1, (-1, chunk)) for x in (a["g"], a["k"], a["v"])
        )
        total = g.sum(2)  # [B, G, H]
        to_end = (total[:, :, None] - g.cumsum(2)).exp()
        writes = torch.einsum("bgchk,bgch,bgchv->bghkv", k, to_end, v)
        after, final = scan({"states": writes, "decay": total, "initial_state": a["initial_state"]})
        entering = torch.cat([a["initial_state"][:, None], after[:, :-1]], 1)
        return holdfast.intra_chunk(a["q"], a["k"], a["v"], a["g"], entering, chunk_size=chunk), final

    exact = values_and_grads(lambda a: holdfast.simple_gla(**a, output_final_state=True), inputs)
    assert_close(values_and_grads(composed, inputs), exact, 1e-12)


@every_kind
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_of_the_scan(kind, packed):
    # each pair of kind, packing and dtype once
    dtype = torch.bfloat16 if packed == kind.startswith("scalar") else torch.float32
    cu_seqlens = torch.tensor([0, 2, 2, 3]) if packed else None
    batch = 1 if packed else 2
    a = scan_arguments(kind, dtype, batch=batch, chunks=3, sequences=3 if packed else None)
    tensors = [a.get(key) for key in ("states", "decay", "W", "Y", "initial_state")]
    leaf = [None if x is None else x.clone().requires_grad_() for x in tensors]
    for keep_final in (True, False):
        forward = torch.ops.holdfast.inter_chunk_forward.default
        torch.library.opcheck(forward, (*leaf, cu_seqlens, True, "", keep_final))
    h, final = torch.ops.holdfast.inter_chunk_forward(*tensors, cu_seqlens, True, "", True)
    history = h if dtype == torch.float32 else None
    grads = (torch.ones_like(h), torch.ones_like(final), history)
    torch.library.opcheck(torch.ops.holdfast.inter_chunk_backward.default, (*grads, *tensors, cu_seqlens, ""))


@pytest.mark.parametrize("given", ["", "g", "g states gate"])
def test_opcheck_of_intra_chunk(given):
    a = {key: x for key, x in intra_arguments(torch.float32, 20).items() if key in ("q", "k", "v", *given.split())}
    tensors = [a.get(key) for key in ("q", "k", "v", "g", "states", "gate")]
    leaf = [None if x is None else x.clone().requires_grad_() for x in tensors]
    rest = (0.5, 16, "silu")
    torch.library.opcheck(torch.ops.holdfast.intra_chunk_forward.default, (*leaf, *rest, True, ""))
    o = torch.ops.holdfast.intra_chunk_forward(*tensors, *rest, True, "")
    torch.library.opcheck(torch.ops.holdfast.intra_chunk_backward.default, (torch.ones_like(o), *tensors, *rest, ""))


def test_they_compile_as_one_graph():
    torch._dynamo.reset()
    arguments = scan_arguments("vector low rank", torch.float32)
    compiled = torch.compile(holdfast.inter_chunk_scan, fullgraph=True, backend="aot_eager")
    graph = values_and_grads(lambda a: compiled(**a, output_final_state=True), arguments)
    assert_close(graph, values_and_grads(scan, arguments), 1e-6)
    arguments = intra_arguments(torch.float32)
    compiled = torch.compile(holdfast.intra_chunk, fullgraph=True, backend="aot_eager")
    graph = values_and_grads(lambda a: compiled(**a, chunk_size=16), arguments)
    assert_close(graph, values_and_grads(intra, arguments), 1e-6)


def test_autocast_casts_inputs_and_keeps_decays_and_states_wide():
    arguments = scan_arguments("scalar low rank", torch.float32)
    inputs = intra_arguments(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h, final = scan(arguments)
        o = intra(inputs)
    narrow = {key: x.bfloat16() if key in ("states", "W", "Y") else x for key, x in arguments.items()}
    for x, y in zip((h, final), scan(narrow), strict=True):
        assert torch.equal(x, y)
        assert x.dtype == y.dtype
    narrow = {key: x.bfloat16() if key in ("q", "k", "v", "gate") else x for key, x in inputs.items()}
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, intra(narrow))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"states": torch.zeros(B, G, H, K)}, ValueError, r"states: expected shape \[B, chunks, H, K, V\]; got"),
        ({"decay": torch.zeros(B, G)}, ValueError, r"decay: expected shape \[B=2, .*\] or \[.*\]; got \[2, 7\]"),
        ({"decay": torch.zeros(B, G, H, V)}, ValueError, r"decay: expected shape .*K=5\]; got \[2, 7, 3, 4\]"),
        ({"decay": torch.zeros(B, G, H).long()}, TypeError, "decay: expected a floating-point dtype; got torch.int64"),
        ({"decay": None}, TypeError, "decay: expected a tensor .*; got None"),
        ({"Y": None}, ValueError, r"Y: expected a tensor \[B, G, H, K, r\] beside W; got None"),
        ({"W": None}, ValueError, r"W: expected a tensor \[B, G, H, K, r\] beside Y; got None"),
        ({"Y": torch.zeros(B, G, H, K, 3)}, ValueError, r"Y: expected shape .*r=2\]; got \[2, 7, 3, 5, 3\]"),
        ({"Y": torch.zeros(B, G, H, K, R).double()}, TypeError, "Y: expected torch.float32.*; got torch.float64"),
        ({"initial_state": torch.zeros(1, H, K, V)}, ValueError, r"initial_state: expected shape \[sequences=2"),
        ({"initial_state": torch.zeros(B, H, K, V).half()}, TypeError, "initial_state: expected torch.float32; got"),
        ({"cu_seqlens": torch.tensor([0, 7])}, ValueError, "cu_seqlens: .* B = 1; got B = 2"),
        (
            {"backend": "magic"},
            ValueError,
            "backend: expected one of 'hopper', 'triton', 'chunked' for inter_chunk_scan; got 'magic'",
        ),
    ],
)
def test_a_mistake_in_the_scan_is_named(wrong, error, message):
    with pytest.raises(error, match=message):
        holdfast.inter_chunk_scan(**scan_arguments("scalar low rank", torch.float32) | wrong)


@pytest.mark.parametrize("bounds", [[0, 4, 2, 7], [0, 5], [1, 7]])
def test_chunk_offsets_that_cannot_be(bounds):
    arguments = scan_arguments("scalar", batch=1)
    del arguments["initial_state"]
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets"):
        holdfast.inter_chunk_scan(**arguments, cu_seqlens=torch.tensor(bounds))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"q": torch.zeros(B, 50, K)}, ValueError, r"q: expected shape \[B, T, Hq, K\]; got \[2, 50, 5\]"),
        ({"q": torch.zeros(3)}, ValueError, r"q: expected shape \[B, T, Hq, K\]; got \[3\]"),
        ({"k": torch.zeros(B, 50, 2, 6)}, ValueError, r"k: expected shape .*K=5\]; got \[2, 50, 2, 6\]"),
        ({"v": torch.zeros(B, 50, 3, V)}, ValueError, "v: expected Hq to divide H; got Hq = 2, H = 3"),
        ({"v": torch.zeros(B, 50, 4, V).double()}, TypeError, "v: expected torch.float32.*; got torch.float64"),
        ({"g": torch.zeros(B, 50, 3)}, ValueError, r"g: expected shape .*H=4\]; got \[2, 50, 3\]"),
        ({"states": torch.zeros(B, 3, 4, K, V)}, ValueError, r"states: expected shape \[B=2, chunks=4, .*got \[2, 3"),
        ({"gate": torch.zeros(B, 50, 4, K)}, ValueError, r"gate: expected shape .*V=4\]; got \[2, 50, 4, 5\]"),
        ({"chunk_size": 0}, ValueError, "chunk_size: expected at least 1; got 0"),
        ({"chunk_size": 16.0}, TypeError, "chunk_size: expected an integer; got float"),
        ({"gate_activation": "relu"}, ValueError, "gate_activation: expected 'silu' or 'sigmoid'; got 'relu'"),
        (
            {"backend": "magic"},
            ValueError,
            "backend: expected one of 'hopper', 'triton', 'chunked' for intra_chunk; got 'magic'",
        ),
    ],
)
def test_a_mistake_in_intra_chunk_is_named(wrong, error, message):
    with pytest.raises(error, match=message):
        holdfast.intra_chunk(**intra_arguments(torch.float32) | {"chunk_size": 16} | wrong)
