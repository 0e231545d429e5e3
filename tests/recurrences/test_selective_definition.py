"""Mamba-1's selective scan written out from its paper, a token, a channel and a number of state at a time."""

import math

import pytest
import torch

from holdfast.recurrences import RECURRENCES, Draw, Sizes, oracle
from parity import assert_close

T, D, N = 7, 6, 3


@pytest.mark.parametrize("groups", [None, 1, 3])
@pytest.mark.parametrize("softplus", [False, True])
def test_mamba1(groups, softplus):
    draw = Draw(0, torch.float64)
    a = RECURRENCES["mamba1"].example(draw, Sizes(B=1, T=T, D=D, N=N))
    if groups:
        a |= {name: draw.normal(1, T, groups, N) for name in "BC"}
    y, S = torch.zeros(1, T, D, dtype=torch.float64), a["initial_state"].clone()
    for d in range(D):
        for t in range(T):
            write, read = (a[name][0, t] if not groups else a[name][0, t, d // (D // groups)] for name in "BC")
            dt = a["dt"][0, t, d].item() + a["dt_bias"][d].item()
            dt = math.log(1 + math.exp(dt)) if softplus else dt
            total = a["D"][d] * a["x"][0, t, d]
            for n in range(N):
                S[0, d, n] = math.exp(dt * a["A"][d, n]) * S[0, d, n] + dt * write[n] * a["x"][0, t, d]
                total = total + read[n] * S[0, d, n]
            z = a["z"][0, t, d]
            y[0, t, d] = total * z / (1 + torch.exp(-z))
    got = oracle(RECURRENCES["mamba1"], a | {"dt_softplus": softplus})
    assert_close(list(got), [y, S], 1e-12)
