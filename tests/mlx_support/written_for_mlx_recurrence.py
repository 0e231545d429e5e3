"""A program as one writes it for mlx-recurrence 0.3.0: scans, states, gradients, a model that trains. A fixture."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx_recurrence import (
    DEFAULT_SEG,
    check_segment_shape,
    gla_scan,
    gla_scan_chunked,
    gla_scan_metal,
    gla_scan_reference,
    gla_scan_with_state,
    legacy,
    parity_check,
    rglru_scan,
    rglru_scan_reference,
    rglru_scan_with_state,
    rotlru_scan,
    rotlru_scan_reference,
    rotlru_scan_with_state,
    selective_scan_chunked,
    selective_scan_metal,
    ssd_scan,
    ssd_scan_reference,
    ssd_scan_with_state,
)
from mlx_recurrence.legacy import gla_scan_metal as old_gla
from mlx_recurrence.rglru import rglru_scan as scan_from_its_module

B, L, H, D, N = 2, 64, 2, 32, 16


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def __call__(self, x):
        a = mx.sigmoid(self.gate(x) + 2)
        return self.out(rglru_scan(a, mx.sqrt(1 - a * a) * self.value(x)))


def train(steps):
    mx.random.seed(1)
    model, optimizer = Mixer(D), optim.Adam(learning_rate=1e-2)
    x = mx.random.normal((B, L, D))
    target = mx.cumsum(x, axis=1) / 8
    loss_and_grad = nn.value_and_grad(model, lambda m: ((m(x) - target) ** 2).mean())
    losses = []
    for _ in range(steps):
        loss, grads = loss_and_grad(model)
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state)
        losses.append(loss.item())
    return losses


def main():
    mx.random.seed(0)
    check_segment_shape(L, DEFAULT_SEG, D, lane_name="D")
    found = {}

    u = mx.random.normal((B, L, H, D))
    delta = mx.abs(mx.random.normal((B, L, H))) * 0.1 + 0.01
    B_in, C_in = mx.random.normal((B, L, H, N)), mx.random.normal((B, L, H, N))
    A_neg = -mx.exp(mx.random.normal((H, N)))
    found["ssd"] = ssd_scan(u, delta, B_in, C_in, A_neg)
    _, found["ssd state"] = ssd_scan_with_state(u, delta, B_in, C_in, A_neg, seg=16)
    names = ["u", "delta", "B", "C", "A_neg"]
    found["ssd parity"], _ = parity_check(
        ssd_scan, ssd_scan_reference, (u, delta, B_in, C_in, A_neg), names, (0, 1, 2, 3, 4), label="ssd", verbose=False
    )

    mx.random.seed(1)
    q = mx.random.normal((B, L, H, D)) * (D**-0.5)
    k, v = mx.random.normal((B, L, H, D)), mx.random.normal((B, L, H, D))
    gates = mx.sigmoid(mx.random.normal((B, L, H)))
    found["gla"] = gla_scan(q, k, v, gates, seg=32)
    _, found["gla state"] = gla_scan_with_state(q, k, v, gates)
    found["gla parity"], report = parity_check(
        gla_scan, gla_scan_reference, (q, k, v, gates), ["q", "k", "v", "gates"], (0, 1, 2, 3), verbose=False
    )
    found["gla report"] = sorted(report)
    found["old gla"] = gla_scan_metal(q, k, v, gates)
    found["older gla"] = old_gla(q, k, v, gates) + legacy.gla_scan_chunked(q, k, v, gates, chunk_size=16)
    found["chunked gla"] = gla_scan_chunked(q, k, v, gates)

    mx.random.seed(2)
    a, x = mx.sigmoid(mx.random.normal((B, L, D))), mx.random.normal((B, L, D))
    found["rglru"] = rglru_scan(a, x)
    _, found["rglru state"] = rglru_scan_with_state(a, x)
    found["rglru from its module"] = scan_from_its_module(a, x, 32) - rglru_scan_reference(a, x)

    pair, theta = a[..., : D // 2], mx.random.uniform(0.0, 3.14, (B, L, D // 2))
    found["rotlru"] = rotlru_scan(pair, mx.cos(theta), mx.sin(theta), x)
    _, found["rotlru state"] = rotlru_scan_with_state(pair, mx.cos(theta), mx.sin(theta), x)
    found["theta"] = mx.grad(lambda t: (rotlru_scan(pair, mx.cos(t), mx.sin(t), x) * x).sum())(theta)
    found["rotlru reference"] = rotlru_scan_reference(pair, mx.cos(theta), mx.sin(theta), x)

    rates = -mx.exp(mx.random.normal((D, N)))
    steps = mx.abs(mx.random.normal((B, L, D))) * 0.1 + 0.01
    args = (x, steps, B_in[:, :, 0], C_in[:, :, 0], rates)
    found["selective"] = selective_scan_metal(*args)
    found["selective chunked"] = selective_scan_chunked(*args, chunk_size=32)

    found["losses"] = train(20)
    return found
