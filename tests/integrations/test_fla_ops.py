"""fla's ops by name, held against their recurrences a token at a time in float64."""

import pytest
import torch
import torch.nn.functional as F

from holdfast.integrations.fla import ops

B, T, H, K, V, D = 2, 5, 4, 3, 6, 7


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float32)


def stepped(q, k, v, decay=None, beta=None, state=None, scale=None):
    """o [B, T, H, V] and the state; decay: logarithms that broadcast to [B, T, H, K]; beta: of a delta write."""
    q, k, v = (x.double() for x in (q, k, v))
    batch, length = q.shape[:2]
    state = q.new_zeros(batch, H, K, V) if state is None else state.double()
    outputs = []
    for t in range(length):
        if decay is not None:
            state = decay.double().expand(batch, length, H, K)[:, t].exp()[..., None] * state
        write = v[:, t]
        if beta is not None:
            write = beta[:, t, :, None] * (write - (state * k[:, t, ..., None]).sum(-2))
        state = state + k[:, t, ..., None] * write[..., None, :]
        outputs.append((K**-0.5 if scale is None else scale) * (state * q[:, t, ..., None]).sum(-2))
    return torch.stack(outputs, 1), state


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def qkv(batch=B):
    given = {"q": drawn(batch, T, H, K), "k": unit(drawn(batch, T, H, K)), "v": drawn(batch, T, H, V)}
    return {name: x.requires_grad_() for name, x in given.items()}


def decays(*shape):
    return F.logsigmoid(drawn(*shape)).requires_grad_()


def strengths(*shape):
    return drawn(*shape).sigmoid().requires_grad_()


HEADS = torch.arange(H, dtype=torch.float64)
RETAINED = torch.log1p(-torch.exp2(-5 - HEADS))[:, None]
LIGHTNING = (-8 / H * (1 - 2 / 6) * HEADS)[:, None]

# fla's name -> the arguments beside q, k and v, drawn for a batch, and what they are to the loop
CALLS = {
    "simple_gla": lambda n: ({"g": (g := decays(n, T, H))}, {"decay": g[..., None]}),
    "simple_gla of constant decay": lambda n: ({"g_gamma": (g := decays(H))}, {"decay": g[:, None]}),
    "simple_gla without decay": lambda n: ({}, {}),
    "gla": lambda n: ({"g": (g := decays(n, T, H, K))}, {"decay": g}),
    "delta_rule": lambda n: ({"beta": (b := strengths(n, T, H))}, {"beta": b}),
    "gated_delta_rule": lambda n: (
        {"g": (g := decays(n, T, H)), "beta": (b := strengths(n, T, H))}, {"decay": g[..., None], "beta": b},
    ),
    "kda": lambda n: (
        {"g": (g := decays(n, T, H, K)), "beta": (b := strengths(n, T, H))}, {"decay": g, "beta": b},
    ),
    "retention": lambda n: ({}, {"decay": RETAINED}),
    "lightning_attn": lambda n: ({"layer_idx": 2, "num_layers": 6}, {"decay": LIGHTNING}),
}  # fmt: skip
NO_REVERSE = ("delta_rule", "gated_delta_rule", "kda")


def called(form, call, batch=B):
    """fla's op, its arguments, and those of the loop."""
    name = call.split()[0]
    given, loop = CALLS[call](batch)
    if name == "gla" and form == "fused_recurrent":
        given = {"gk": given["g"]}
    shared = qkv(batch)
    return getattr(ops, f"{form}_{name}"), shared | given, shared | loop


def gradients(found, leaves):
    o, state = found
    return torch.autograd.grad(o.double().sin().sum() + state.double().cos().sum(), leaves)


def assert_close(found, right):
    for got, wanted in zip(found, right, strict=True):
        torch.testing.assert_close(got.double(), wanted.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("call", CALLS)
def test_outputs_states_and_gradients(form, call):
    op, given, loop = called(form, call)
    leaves = [x for x in given.values() if isinstance(x, torch.Tensor)]
    state = drawn(B, H, K, V).requires_grad_()
    found = op(**given, initial_state=state, output_final_state=True, scale=0.7)
    right = stepped(**loop, state=state, scale=0.7)
    assert_close(found, right)
    assert_close(*(gradients(each, (*leaves, state)) for each in (found, right)))
    o, last = op(**given)
    assert_close([o], stepped(**loop)[:1])
    assert last is None


@pytest.mark.parametrize("call", CALLS)
def test_states_turned_round(call):
    op, given, loop = called("fused_recurrent", call)
    if call in ("delta_rule", "lightning_attn"):
        with pytest.raises(TypeError, match="state_v_first"):
            op(**given, state_v_first=True)
        return
    state = drawn(B, H, K, V)
    o, last = op(**given, initial_state=state.mT.contiguous(), output_final_state=True, state_v_first=True)
    assert_close((o, last.mT), stepped(**loop, state=state))
    assert last.is_contiguous()


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("call", CALLS)
def test_packed_sequences(form, call):
    op, given, loop = called(form, call, batch=1)
    offsets, states = torch.tensor([0, 2, 2, T]), drawn(3, H, K, V)
    o, last = op(**given, initial_state=states, output_final_state=True, cu_seqlens=offsets)
    for n, (a, b) in enumerate(((0, 2), (2, T))):
        n = 2 * n
        part = {name: x[:, a:b] if name != "decay" or x.dim() > 2 else x for name, x in loop.items()}
        assert_close((o[:, a:b], last[n : n + 1]), stepped(**part, state=states[n : n + 1]))
    assert torch.equal(last[1], states[1])


@pytest.mark.parametrize("call", [call for call in CALLS if call not in NO_REVERSE])
def test_time_turned_round(call):
    op, given, loop = called("fused_recurrent", call)
    state = drawn(B, H, K, V)
    back = {name: x.flip(1) if name != "decay" or x.dim() > 2 else x for name, x in loop.items()}
    o, last = op(**given, initial_state=state, output_final_state=True, reverse=True)
    right, after = stepped(**back, state=state)
    assert_close((o, last), (right.flip(1), after))
    op, given, _ = called("fused_recurrent", call, batch=1)
    offsets, states = torch.tensor([0, 2, 2, T]), drawn(3, H, K, V)
    o, last = op(**given, initial_state=states, output_final_state=True, reverse=True, cu_seqlens=offsets)
    for n, a, b in ((0, 0, 2), (2, 2, T)):
        part = {name: x[:, a:b] if isinstance(x, torch.Tensor) and x.dim() > 1 else x for name, x in given.items()}
        alone = op(**part, initial_state=states[n : n + 1], output_final_state=True, reverse=True)
        assert_close((o[:, a:b], last[n : n + 1]), alone)
    assert torch.equal(last[1], states[1])


def test_what_a_layer_asks_of_the_delta_rules():
    """Norms, gates and sigmoids inside, against the same in front."""
    raw = qkv() | {"q": drawn(B, T, H, K), "k": drawn(B, T, H, K)}
    beta, A_log, bias = drawn(B, T, H), drawn(H), drawn(H)
    unit_qkv = raw | {"q": unit(raw["q"]), "k": unit(raw["k"])}
    norm = {"use_qk_l2norm_in_kernel": True}
    for form in ("chunk", "fused_recurrent"):
        found = getattr(ops, f"{form}_delta_rule")(**raw, beta=beta.sigmoid(), output_final_state=True, **norm)
        assert_close(found, stepped(**unit_qkv, beta=beta.sigmoid()))
    sigmoid = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "output_final_state": True} | norm
    gate = {"use_gate_in_kernel": True, "A_log": A_log} | sigmoid
    for form in ("chunk", "fused_recurrent"):
        g = drawn(B, T, H)
        decay = (-A_log.exp() * F.softplus(g + bias))[..., None]
        found = getattr(ops, f"{form}_gated_delta_rule")(**raw, g=g, beta=beta, dt_bias=bias, **gate)
        assert_close(found, stepped(**unit_qkv, beta=2 * beta.sigmoid(), decay=decay))
        g, wide = drawn(B, T, H, K), drawn(H * K)
        decay = -A_log[:, None].exp() * F.softplus(g + wide.view(H, K))
        found = getattr(ops, f"{form}_kda")(**raw, g=g, beta=beta, dt_bias=wide, **gate)
        assert_close(found, stepped(**unit_qkv, beta=2 * beta.sigmoid(), decay=decay))
        decay = -3 * torch.sigmoid(A_log[:, None].exp() * (g + wide.view(H, K)))
        found = getattr(ops, f"{form}_kda")(**raw, g=g, beta=beta, dt_bias=wide, lower_bound=-3.0, **gate)
        assert_close(found, stepped(**unit_qkv, beta=2 * beta.sigmoid(), decay=decay))


def test_what_is_left_out():
    """Write strengths are 1, decays 0."""
    given, one = qkv(), torch.ones(B, T, H)
    gk, g = decays(B, T, H, K), decays(B, T, H)
    both = g[..., None] + gk
    for found, right in (
        (ops.fused_recurrent_delta_rule(**given), stepped(**given, beta=one)),
        (ops.fused_recurrent_gated_delta_rule(**given), stepped(**given, beta=one)),
        (ops.fused_recurrent_gated_delta_rule(**given, gk=gk), stepped(**given, beta=one, decay=gk)),
        (ops.fused_recurrent_gated_delta_rule(**given, g=g, gk=gk), stepped(**given, beta=one, decay=both)),
        (ops.fused_recurrent_gla(**given), stepped(**given)),
    ):
        assert_close(found[:1], right[:1])


@pytest.mark.parametrize("op", [ops.chunk_hgrn, ops.fused_recurrent_hgrn])
def test_hgrn(op):
    x, g, state = drawn(B, T, D).requires_grad_(), decays(B, T, D), drawn(B, D).requires_grad_()
    h, right = state.double(), []
    for t in range(T):
        h = g[:, t].double().exp() * h + x[:, t]
        right.append(h)
    found, wanted = op(x, g, state, True), (torch.stack(right, 1), h)
    assert_close(found, wanted)
    assert_close(*(gradients(each, (x, g, state)) for each in (found, wanted)))
    assert op(x, g)[1] is None


def test_packed_hgrn():
    x, g, states = drawn(1, T, D), decays(1, T, D), drawn(2, D)
    o, last = ops.fused_recurrent_hgrn(x, g, states, True, torch.tensor([0, 2, T]))
    for n, (a, b) in enumerate(((0, 2), (2, T))):
        assert_close((o[:, a:b], last[n : n + 1]), ops.chunk_hgrn(x[:, a:b], g[:, a:b], states[n : n + 1], True))


FORMS = [
    f"{form}_{name}" for form in ("chunk", "fused_recurrent") for name in {call.split()[0]: None for call in CALLS}
]


@pytest.mark.parametrize("name", FORMS)
def test_head_first_is_refused_and_unknown_arguments_are(name):
    form = "chunk" if name.startswith("chunk") else "fused_recurrent"
    op, given, _ = called(form, name.removeprefix(f"{form}_"))
    op(**given, head_first=False)
    with pytest.raises(ValueError, match="head_first: Holdfast's op has none"):
        op(**given, head_first=True)
    with pytest.raises(TypeError, match="use_exp2"):
        op(**given, use_exp2=True)


def test_what_is_not_served():
    given, g, gk = qkv(), decays(B, T, H), decays(B, T, H, K)
    recurrent = ops.fused_recurrent_gated_delta_rule
    for run, wrong, message in (
        (ops.fused_recurrent_gla, {"gk": gk, "gv": drawn(B, T, H, V)}, "gv: Holdfast's op has none"),
        (recurrent, {"g": g, "gv": drawn(B, T, H, V)}, "gv: Holdfast's op has none"),
        (
            recurrent,
            {"gk": gk, "use_gate_in_kernel": True, "A_log": drawn(H)},
            "use_gate_in_kernel: expected g",
        ),
        (recurrent, {"g": g, "gk": g}, r"gk: expected shape \[B, T, HV, K=3\]; got \[2, 5, 4\]"),
        (recurrent, {"g": g, "use_gate_in_kernel": True}, "A_log: expected a tensor"),
        (recurrent, {"g": g, "allow_neg_eigval": True}, "allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True"),
        (ops.chunk_simple_gla, {"g": g, "g_gamma": decays(H)}, "g_gamma: expected None beside g"),
        (ops.chunk_delta_rule, {"beta": drawn(B, T, H, V)}, r"beta: expected shape \[B=2, T=5, H=4\]"),
        (ops.chunk_kda, {"g": gk, "beta": g, "use_graph": True}, "use_graph: Holdfast's op has none"),
        (ops.chunk_lightning_attn, {"layer_idx": 6, "num_layers": 6}, "layer: expected 0 <= layer < num_layers = 6"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**given, **wrong)
