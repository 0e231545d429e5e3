"""Each mixer of the matrix family against its paper's equations, written out a token and a head at a time."""

import math

import pytest
import torch

from holdfast.kernels.rotary.torch.backend import rotate
from holdfast.nn import GLA, KDA, MLSTM, DeltaNet, GatedDeltaNet, GatedDeltaProduct, Mamba2, RetNet
from parity import relative_error

LENGTH = 12
WIDTH = 16


def silu(x):
    return x / (1 + torch.exp(-x))


def softplus(x):
    return torch.log(1 + torch.exp(x))


def rms(x, eps):
    return x / torch.sqrt((x * x).mean() + eps)


def unit(x):
    return x / torch.sqrt((x * x).sum() + 1e-6)


def causal_convolution(rows, weight, bias=0.0):
    """rows [T, C], weight [C, taps]: the last tap meets the present row."""
    taps = weight.shape[1]
    result = []
    for t in range(len(rows)):
        y = torch.zeros_like(rows[0]) + bias
        for back in range(min(taps, t + 1)):
            y = y + weight[:, taps - 1 - back] * rows[t - back]
        result.append(silu(y))
    return torch.stack(result)


def gla(m, x):
    q, k, v, gate, down = (x @ m.in_proj.weight[: sum(m.widths)].T).split(m.widths, -1)
    alpha = torch.sigmoid(down @ m.decay_up.weight.T + m.decay_up.bias) ** (1 / 16)
    outputs = []
    for head in range(m.num_heads):
        key, value = (slice(head * n, (head + 1) * n) for n in (m.key_dim, m.value_dim))
        S, ys = torch.zeros(m.key_dim, m.value_dim, dtype=x.dtype), []
        for t in range(len(x)):
            S = alpha[t, key][:, None] * S + torch.outer(k[t, key], v[t, value])
            o = S.T @ q[t, key] / math.sqrt(m.key_dim)
            ys.append(rms(o, 1e-5) * m.norm.weight * silu(gate[t, value]))
        outputs.append(torch.stack(ys))
    return torch.cat(outputs, -1) @ m.out_proj.weight.T


def retnet(m, x):
    q, k, v, gate = (x @ m.in_proj.weight.T).split(m.widths, -1)
    outputs = []
    for head in range(m.num_heads):
        key, value = (slice(head * n, (head + 1) * n) for n in (m.key_dim, m.value_dim))
        # the parallel form, with the rotation as a factor e^(i theta) on complex pairs
        half = m.key_dim // 2
        theta = torch.tensor([10000.0 ** (-j / half) for j in range(half)], dtype=x.dtype)
        turn = torch.exp(1j * torch.arange(len(x))[:, None] * theta)
        Q, K = (torch.complex(a[:, key][:, :half], a[:, key][:, half:]) * turn for a in (q, k))
        scores = (Q @ K.conj().T).real / math.sqrt(m.key_dim)
        gamma = 1 - 2.0 ** (-5 - head)
        steps = range(len(x))
        D = torch.tensor([[gamma ** (t - s) if t >= s else 0.0 for s in steps] for t in steps], dtype=x.dtype)
        o = (scores * D) @ v[:, value]
        outputs.append(torch.stack([rms(row, 1e-5) for row in o]) * m.norm.weight * silu(gate[:, value]))
    return torch.cat(outputs, -1) @ m.out_proj.weight.T


def mamba2(m, x):
    inner, written = m.num_heads * m.head_dim, m.n_groups * m.d_state
    widths = [inner, inner + 2 * written, m.num_heads]
    z, xBC, dt = (x @ m.in_proj.weight[: sum(widths)].T).split(widths, -1)
    xBC = causal_convolution(xBC, m.conv.weight, m.conv.bias)
    u, B, C = xBC.split([inner, written, written], -1)
    dt, A = softplus(dt + m.dt_bias), -torch.exp(m.A_log)
    rows = torch.zeros(len(x), inner, dtype=x.dtype)
    for head in range(m.num_heads):
        channels = slice(head * m.head_dim, (head + 1) * m.head_dim)
        group = head * m.n_groups // m.num_heads
        states = slice(group * m.d_state, (group + 1) * m.d_state)
        h = torch.zeros(m.head_dim, m.d_state, dtype=x.dtype)
        for t in range(len(x)):
            h = torch.exp(dt[t, head] * A[head]) * h + dt[t, head] * torch.outer(u[t, channels], B[t, states])
            rows[t, channels] = h @ C[t, states] + m.D[head] * u[t, channels]
    rows = rows * silu(z)
    normed = [torch.cat([rms(part, 1e-5) for part in row.chunk(m.n_groups)]) for row in rows]
    return torch.stack(normed) * m.norm.weight.flatten() @ m.out_proj.weight.T


def mlstm(m, x):
    q, k, v, gate, gates = (x @ m.in_proj.weight[: sum(m.widths)].T).split(m.widths, -1)
    i, f = (15 * torch.tanh((gates + m.gate_bias) / 15)).chunk(2, -1)
    outputs = []
    for head in range(m.num_heads):
        key, value = (slice(head * n, (head + 1) * n) for n in (m.key_dim, m.value_dim))
        # without stabiliser: max(|n q|, exp(-m)) of scaled states is max(|n q|, 1) of these
        C, n = torch.zeros(m.key_dim, m.value_dim, dtype=x.dtype), torch.zeros(m.key_dim, dtype=x.dtype)
        stabilizer, ys = torch.zeros((), dtype=x.dtype), []
        for t in range(len(x)):
            forget, write = torch.sigmoid(f[t, head]), torch.exp(i[t, head])
            C = forget * C + write * torch.outer(k[t, key], v[t, value])
            n = forget * n + write * k[t, key]
            stabilizer = torch.maximum(torch.log(forget) + stabilizer, i[t, head])
            read = q[t, key] / math.sqrt(m.key_dim)
            h = C.T @ read / (torch.clamp((n @ read).abs(), min=1) + 1e-6 * torch.exp(stabilizer))
            centred = h - h.mean()
            ys.append(rms(centred, 1e-6) * m.norm.weight[head] * torch.sigmoid(gate[t, value]))
        outputs.append(torch.stack(ys))
    return torch.cat(outputs, -1) @ m.out_proj.weight.T


def projected(m, x):
    """What a delta layer projects x to; nothing reads the last columns."""
    *parts, _ = (x @ m.in_proj.weight.T).split([*m.widths, m.in_proj.weight.shape[0] - sum(m.widths)], -1)
    return parts


def delta_heads(m, qkv, decay, beta, gate):
    """Per value head, S (V x K as in the papers) = S (a I - a b k k^T) + b v k^T, read by q."""
    heads = beta.shape[1]
    q, k, v = causal_convolution(torch.cat(qkv, -1), m.conv.weight).split(m.widths[:3], -1)
    outputs = []
    for head in range(heads):
        shared = head * m.num_heads // heads
        key = slice(shared * m.key_dim, (shared + 1) * m.key_dim)
        value = slice(head * m.value_dim, (head + 1) * m.value_dim)
        S, ys = torch.zeros(m.value_dim, m.key_dim, dtype=q.dtype), []
        for t in range(len(q)):
            kt, qt, b = unit(k[t, key]), unit(q[t, key]), beta[t, head]
            erase = torch.eye(m.key_dim, dtype=q.dtype) - b * torch.outer(kt, kt)
            S = S @ (decay[t, head] * erase) + b * torch.outer(v[t, value], kt)
            ys.append(rms(S @ qt / math.sqrt(m.key_dim), 1e-5) * m.norm.weight * gate[t, value])
        outputs.append(torch.stack(ys))
    return torch.cat(outputs, -1) @ m.out_proj.weight.T


def delta_net(m, x):
    *qkv, b = projected(m, x)
    beta = torch.sigmoid(b) * (2 if m.allow_neg_eigval else 1)
    return delta_heads(m, qkv, torch.ones_like(beta), beta, torch.ones_like(qkv[2]))


def gated_delta_net(m, x):
    *qkv, gate, a, b = projected(m, x)
    alpha = torch.exp(-torch.exp(m.A_log) * softplus(a + m.dt_bias))
    beta = torch.sigmoid(b) * (2 if m.allow_neg_eigval else 1)
    return delta_heads(m, qkv, alpha, beta, silu(gate))


def by_fla_names(m):
    """The weights of a layer under the names that flash-linear-attention gives them."""
    keys, values, heads = m.num_heads * m.key_dim, m.num_v_heads * m.value_dim, m.num_v_heads
    if isinstance(m, KDA):
        widths = {"q": keys, "k": keys, "v": values, "f_proj.0": m.value_dim, "g_proj.0": m.value_dim, "b_proj": heads}
        own = {"f_proj.1": m.decay_up.weight, "g_proj.1": m.gate_up.weight, "g_proj.1.bias": m.gate_up.bias}
    else:
        n = m.num_householder
        widths = {"q": keys, "k": n * keys, "v": n * values, "g_proj": values, "b_proj": n * heads}
        widths |= {"a_proj": heads} if m.forget_gate else {}
        own = {}
    rows = m.in_proj.weight[: sum(widths.values())].split(list(widths.values()))
    found = {name if "_" in name else f"{name}_proj": x for name, x in zip(widths, rows, strict=True)}
    taps = m.conv.weight.split([widths[name] for name in "qkv"])
    found |= {f"{name}_conv1d": x for name, x in zip("qkv", taps, strict=True)}
    decay = {"A_log": m.A_log, "dt_bias": m.dt_bias} if "A_log" in dict(m.named_parameters()) else {}
    return found | own | decay | {"o_norm": m.norm.weight, "o_proj": m.out_proj.weight}


def gated_delta_product(m, x, weights=None):
    """Per value head, for each of a token's keys S (K x V) = (I - b k k^T) S + b k v^T, after one decay a token.

    weights: those of the layer, by fla's names.
    """
    w = by_fla_names(m) if weights is None else weights
    q, k, v = (causal_convolution(x @ w[f"{name}_proj"].T, w[f"{name}_conv1d"]) for name in "qkv")
    beta = torch.sigmoid(x @ w["b_proj"].T) * (2 if m.allow_neg_eigval else 1)
    alpha = torch.ones(len(x), m.num_v_heads, dtype=x.dtype)
    if m.forget_gate:
        alpha = torch.exp(-torch.exp(w["A_log"]) * softplus(x @ w["a_proj"].T + w["dt_bias"]))
    gate, outputs, heads = silu(x @ w["g_proj"].T), [], m.num_v_heads
    for head in range(heads):
        shared = head * m.num_heads // heads
        value = slice(head * m.value_dim, (head + 1) * m.value_dim)
        S, ys = torch.zeros(m.key_dim, m.value_dim, dtype=x.dtype), []
        for t in range(len(x)):
            S = alpha[t, head] * S
            for n in range(m.num_householder):
                kt = unit(k[t].unflatten(0, (m.num_householder, m.num_heads, -1))[n, shared])
                vt = v[t].unflatten(0, (m.num_householder, heads, -1))[n, head]
                b = beta[t].unflatten(0, (m.num_householder, heads))[n, head]
                S = (torch.eye(m.key_dim, dtype=x.dtype) - b * torch.outer(kt, kt)) @ S + b * torch.outer(kt, vt)
            qt = unit(q[t, shared * m.key_dim : (shared + 1) * m.key_dim])
            ys.append(rms(S.T @ qt / math.sqrt(m.key_dim), 1e-5) * w["o_norm"] * gate[t, value])
        outputs.append(torch.stack(ys))
    return torch.cat(outputs, -1) @ w["o_proj"].T


def kimi_delta_attention(m, x, weights=None):
    """Per value head, S (K x V) = (I - b k k^T) diag(a) S + b k v^T, read by q; as in Kimi Linear's equation 1.

    weights: those of the layer, by fla's names.
    """
    w = by_fla_names(m) if weights is None else weights
    q, k, v = (causal_convolution(x @ w[f"{name}_proj"].T, w[f"{name}_conv1d"]) for name in "qkv")
    decay = x @ w["f_proj.0"].T @ w["f_proj.1"].T + w["dt_bias"]
    beta = torch.sigmoid(x @ w["b_proj"].T) * (2 if m.allow_neg_eigval else 1)
    gate = torch.sigmoid(x @ w["g_proj.0"].T @ w["g_proj.1"].T + w["g_proj.1.bias"])
    heads, outputs = beta.shape[1], []
    for head in range(heads):
        shared = head * m.num_heads // heads
        key, value, rate = (
            slice(n * width, (n + 1) * width)
            for n, width in ((shared, m.key_dim), (head, m.value_dim), (head, m.key_dim))
        )
        A = torch.exp(w["A_log"][head])
        if m.lower_bound is None:
            alpha = torch.exp(-A * softplus(decay[:, rate]))
        else:
            alpha = torch.exp(m.lower_bound * torch.sigmoid(A * decay[:, rate]))
        S, ys = torch.zeros(m.key_dim, m.value_dim, dtype=x.dtype), []
        for t in range(len(x)):
            kt, qt, b = unit(k[t, key]), unit(q[t, key]), beta[t, head]
            erase = torch.eye(m.key_dim, dtype=x.dtype) - b * torch.outer(kt, kt)
            S = erase @ torch.diag(alpha[t]) @ S + b * torch.outer(kt, v[t, value])
            ys.append(rms(S.T @ qt / math.sqrt(m.key_dim), 1e-5) * w["o_norm"] * gate[t, value])
        outputs.append(torch.stack(ys))
    return torch.cat(outputs, -1) @ w["o_proj"].T


@pytest.mark.parametrize(
    ("make", "equations"),
    [
        (lambda: GLA(WIDTH, 2), gla),
        (lambda: RetNet(WIDTH, 2), retnet),
        (lambda: Mamba2(WIDTH, 4, d_state=6, n_groups=2), mamba2),
        (lambda: MLSTM(WIDTH, 2), mlstm),
        (lambda: MLSTM(WIDTH, 2, input_gate_bias=2.0), mlstm),
        (lambda: DeltaNet(WIDTH, 2), delta_net),
        (lambda: DeltaNet(WIDTH, 2, allow_neg_eigval=True), delta_net),
        (lambda: GatedDeltaNet(WIDTH, 2), gated_delta_net),
        (lambda: GatedDeltaNet(WIDTH, 2, head_dim=6, num_v_heads=4, expand_v=1.5), gated_delta_net),
        (lambda: GatedDeltaProduct(WIDTH, 2), gated_delta_product),
        (lambda: GatedDeltaProduct(WIDTH, 2, head_dim=6, num_v_heads=4, num_householder=3), gated_delta_product),
        (lambda: GatedDeltaProduct(WIDTH, 2, forget_gate=False, allow_neg_eigval=False), gated_delta_product),
        (lambda: KDA(WIDTH, 2), kimi_delta_attention),
        (lambda: KDA(WIDTH, 2, lower_bound=-5.0, allow_neg_eigval=True), kimi_delta_attention),
        (lambda: KDA(WIDTH, 2, head_dim=6, num_v_heads=4, expand_v=1.5), kimi_delta_attention),
    ],
)
@torch.no_grad()
def test_equals_the_papers_equations(make, equations):
    mixer = make().double()
    mixer.norm.weight.uniform_(0.5, 1.5)
    if isinstance(mixer, KDA):
        mixer.A_log.add_(torch.randn_like(mixer.A_log))
    x = 2 * torch.randn(3, LENGTH, WIDTH, dtype=torch.float64)
    expected = torch.stack([equations(mixer, sequence) for sequence in x])
    assert relative_error(mixer(x)[0], expected) <= 1e-9


def test_mamba2_starts_as_in_the_paper():
    mixer = Mamba2(16, 1024, d_state=1, expand=64)
    A, dt = mixer.A_log.exp(), torch.nn.functional.softplus(mixer.dt_bias)
    assert 1 <= A.min() < 2
    assert 15 < A.max() <= 16
    assert 0.00099 < dt.min() < 0.002
    assert 0.05 < dt.max() < 0.101
    assert torch.equal(mixer.D, torch.ones(1024))
    mixer = Mamba2(128)
    assert (mixer.num_heads, mixer.head_dim, mixer.d_state) == (4, 64, 128)


def test_mlstm_starts_with_closed_input_gates_and_open_forget_gates():
    i, f = MLSTM(64, 4).gate_bias.chunk(2)
    assert torch.equal(i, torch.full((4,), -10.0))
    torch.testing.assert_close(f, torch.tensor([3.0, 4, 5, 6]))


def test_rotation_keeps_length_and_depends_on_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    far = 10**7

    def score(m, n):
        return (rotate(q, torch.tensor([[m]])) * rotate(k, torch.tensor([[n]]))).sum()

    torch.testing.assert_close(score(far + 5, far + 2), score(3, 0), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(rotate(q, torch.tensor([[far]])).norm(), q.norm())
