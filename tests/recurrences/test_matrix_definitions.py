"""Each matrix recurrence written out from its paper, a token and a head at a time, against its definition."""

import math

import pytest
import torch

from holdfast.recurrences import RECURRENCES, Draw, Sizes, oracle
from parity import assert_close, leaves

T, H, K, V = 11, 3, 4, 5


def example(name):
    return RECURRENCES[name].example(Draw(0, torch.float64), Sizes(B=1, T=T, H=H, K=K, V=V))


def outer_product_loop(a, decay, write):
    """o and the final state, with decay(t, h) and write(S, t, h) as the paper has them."""
    o, states = torch.zeros(1, T, H, V, dtype=torch.float64), []
    for h in range(H):
        S = a["initial_state"][0, h].clone()
        for t in range(T):
            S = write(decay(t, h) * S, t, h)
            o[0, t, h] = S.T @ a["q"][0, t, h] / math.sqrt(K)
        states.append(S)
    return o, torch.stack(states)[None]


@pytest.mark.parametrize("name", ["linear_attention", "retnet", "lightning", "simple_gla", "gla"])
def test_additive_writes(name):
    a = example(name)
    decay = {
        "linear_attention": lambda t, h: 1.0,
        "retnet": lambda t, h: 1 - 2.0 ** (-5 - h),
        "lightning": lambda t, h: math.exp(-8 * h / H),
        "simple_gla": lambda t, h: a["g"][0, t, h].exp(),
        "gla": lambda t, h: a["g"][0, t, h, :, None].exp(),
    }[name]
    expected = outer_product_loop(a, decay, lambda S, t, h: S + torch.outer(a["k"][0, t, h], a["v"][0, t, h]))
    assert_close(list(oracle(RECURRENCES[name], a)), list(expected), 1e-12)


@pytest.mark.parametrize("name", ["delta_rule", "gated_delta_rule"])
def test_delta_writes(name):
    a = example(name)

    def write(S, t, h):
        k, v, beta = a["k"][0, t, h], a["v"][0, t, h], a["beta"][0, t, h]
        # the paper's form: S (I - beta k k^T) + beta v k^T, transposed
        return S - beta * torch.outer(k, k) @ S + beta * torch.outer(k, v)

    decay = (lambda t, h: a["g"][0, t, h].exp()) if "g" in a else (lambda t, h: 1.0)
    assert_close(list(oracle(RECURRENCES[name], a)), list(outer_product_loop(a, decay, write)), 1e-12)


def two_keys(name):
    """What stands between the decayed state and the next: (state before, state decayed, t, h) -> the next."""
    a = example(name)

    def gdn2(before, S, t, h):
        k, b, v, w = (a[key][0, t, h] for key in "kbvw")
        # the paper's form: (I - k (b k)^T) S + k (w v)^T
        return (torch.eye(K, dtype=torch.float64) - torch.outer(k, b * k)) @ S + torch.outer(k, w * v)

    def comba(before, S, t, h):
        k, p, v, beta = (a[key][0, t, h] for key in ("k", "p", "v", "beta"))
        # the paper's form: S (alpha - beta p k^T) + beta v k^T, transposed
        return S - beta * torch.outer(k, p) @ before + beta * torch.outer(k, v)

    def rwkv7(before, S, t, h):
        k, v, read, written = (a[key][0, t, h] for key in "kvab")
        return S + torch.outer(written, read) @ before + torch.outer(k, v)

    return a, {"gdn2": gdn2, "comba": comba, "rwkv7": rwkv7}[name]


@pytest.mark.parametrize("name", ["gdn2", "comba", "rwkv7"])
def test_writes_by_one_key_and_erasures_by_another(name):
    a, write = two_keys(name)
    log, read = a["w" if name == "rwkv7" else "g"], a["r" if name == "rwkv7" else "q"]
    o, states = torch.zeros(1, T, H, V, dtype=torch.float64), []
    for h in range(H):
        S = a["initial_state"][0, h].clone()
        for t in range(T):
            kept = log[0, t, h].exp()
            S = write(S, (kept[:, None] if kept.dim() else kept) * S, t, h)
            o[0, t, h] = S.T @ read[0, t, h] * (1 if name == "rwkv7" else 1 / math.sqrt(K))
        states.append(S)
    assert_close(list(oracle(RECURRENCES[name], a)), [o, torch.stack(states)[None]], 1e-12)


@pytest.mark.parametrize("decays", [True, False])
def test_gated_delta_product(decays):
    a = example("gated_delta_product")
    if not decays:
        a["g"] = None
    o, states = torch.zeros(1, T, H, V, dtype=torch.float64), []
    for h in range(H):
        S = a["initial_state"][0, h].clone()
        for t in range(T):
            S = a["g"][0, t, h].exp() * S if decays else S
            for n in range(2):
                k, v, beta = (a[key][0, t, n, h] for key in ("k", "v", "beta"))
                S = S - beta * torch.outer(k, k) @ S + beta * torch.outer(k, v)
            o[0, t, h] = S.T @ a["q"][0, t, h] / math.sqrt(K)
        states.append(S)
    assert_close(list(oracle(RECURRENCES["gated_delta_product"], a)), [o, torch.stack(states)[None]], 1e-12)


def test_lightning_weakens_with_the_layer():
    a = example("lightning")
    expected = outer_product_loop(
        a, lambda t, h: math.exp(-8 * h / H * 0.25), lambda S, t, h: S + torch.outer(a["k"][0, t, h], a["v"][0, t, h])
    )
    assert_close(list(oracle(RECURRENCES["lightning"], a | {"layer": 3, "num_layers": 4})), list(expected), 1e-12)


@pytest.mark.parametrize("wide", [False, True])
def test_ssd(wide):
    a = example("ssd")
    if wide:
        a["A"] = -Draw(2, torch.float64).gate(H, K)
    y = torch.zeros(1, T, H, V, dtype=torch.float64)
    states = []
    for h in range(H):
        S = a["initial_state"][0, h].clone()
        for t in range(T):
            dt = math.log1p(math.exp(a["dt"][0, t, h] + a["dt_bias"][h]))
            decay = torch.exp(dt * a["A"][h])
            x = a["x"][0, t, h]
            S = (decay[:, None] if wide else decay) * S + dt * torch.outer(a["B"][0, t, h], x)
            z = a["z"][0, t, h]
            y[0, t, h] = (S.T @ a["C"][0, t, h] + a["D"][h] * x) * z * torch.sigmoid(z)
        states.append(S)
    got = oracle(RECURRENCES["ssd"], a | {"dt_softplus": True})
    assert_close(list(got), [y, torch.stack(states)[None]], 1e-12)


@pytest.mark.parametrize("gating", ["exp", "sigmoid"])
def test_mlstm_without_its_stabiliser(gating):
    a = example("mlstm")
    C0, n0, m0 = a["initial_state"]
    o, states, eps = torch.zeros(1, T, H, V, dtype=torch.float64), [], 1e-6
    for h in range(H):
        # unstabilised: the true state is the stored one times exp(m)
        scale = m0[0, h].exp() if gating == "exp" else 1.0
        C, n, m = C0[0, h] * scale, n0[0, h] * scale, m0[0, h]
        for t in range(T):
            f, i = torch.sigmoid(a["f"][0, t, h]), a["i"][0, t, h]
            w = i.exp() if gating == "exp" else torch.sigmoid(i)
            m = torch.maximum(f.log() + m, i) if gating == "exp" else torch.zeros(())
            C = f * C + w * torch.outer(a["k"][0, t, h], a["v"][0, t, h])
            n = f * n + w * a["k"][0, t, h]
            q = a["q"][0, t, h] / math.sqrt(K)
            o[0, t, h] = C.T @ q / (torch.maximum((n @ q).abs(), torch.ones(())) + eps * m.exp())
        states.append((C / m.exp(), n / m.exp(), m if gating == "exp" else m0[0, h]))
    final = [torch.stack(parts)[None] for parts in zip(*states, strict=True)]
    got = oracle(RECURRENCES["mlstm"], a | {"gating": gating})
    assert_close(leaves(got), [o, *final], 1e-12)
