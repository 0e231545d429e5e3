"""torch.compile takes the functions in without a break, states updated in place too."""

import pytest
import torch
import torch.nn.functional as F

from holdfast.integrations.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from holdfast.integrations.fla.ops import chunk_kda
from holdfast.integrations.flashrnn import flashrnn
from holdfast.integrations.mamba_ssm import mamba_chunk_scan_combined, mamba_inner_fn, selective_state_update
from holdfast.integrations.mlstm_kernels.torch.backend_module import mLSTMBackend, mLSTMBackendConfig


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float32)


def kda():
    return chunk_kda, (*drawn(3, 1, 5, 2, 4), F.logsigmoid(drawn(1, 5, 2, 4)), drawn(1, 5, 2).sigmoid())


def convolution():
    return causal_conv1d_fn, (drawn(2, 4, 5), drawn(4, 3), None, None, drawn(2, 4, 2), True)


def convolution_of_a_pool():
    rows = torch.tensor([2, -1])
    return causal_conv1d_update, (drawn(2, 4), drawn(3, 4, 3), drawn(4, 3), None, "silu", None, rows)


def token():
    return selective_state_update, (drawn(2, 4, 3), drawn(2, 4), drawn(2, 4), -drawn(4, 3).exp(), *drawn(2, 2, 3))


def scan():
    return mamba_chunk_scan_combined, (drawn(2, 5, 2, 3), drawn(2, 5, 2), -drawn(2).exp(), *drawn(2, 2, 5, 1, 4), 4)


def layer():
    weights = drawn(4, 1, 3), drawn(4), drawn(8, 4), drawn(4, 2), drawn(5, 4), None, -drawn(4, 3).exp()
    return mamba_inner_fn, (drawn(2, 8, 5), *weights)


def lstm():
    def all_states(*given):
        states, last = flashrnn(*given)
        return states[0], states[1], last

    return all_states, (drawn(2, 5, 4, 2, 3), drawn(4, 2, 3, 3), drawn(4, 2, 3), drawn(2, 2, 1, 2, 3))


def xlstm():
    def prompt_and_token(*given):
        infer = mLSTMBackend(mLSTMBackendConfig(mode="inference"))
        h, states = infer(*given)
        token, states = infer(*(x[:, :, :1] for x in given), *states)
        return h, token, *states

    return prompt_and_token, (*drawn(3, 2, 3, 5, 4), *drawn(2, 2, 3, 5))


@pytest.mark.parametrize("call", [kda, convolution, convolution_of_a_pool, token, scan, layer, lstm, xlstm])
def test_one_graph(call):
    function, given = call()
    again = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
    right = function(*again)
    found = torch.compile(function, fullgraph=True, backend="eager")(*given)
    # and what it wrote to
    for got, wanted in zip((found, *given), (right, *again), strict=True):
        if isinstance(got, torch.Tensor | tuple):
            torch.testing.assert_close(got, wanted)
