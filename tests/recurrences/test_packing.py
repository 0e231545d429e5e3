"""Packed sequences in plain tensor arithmetic: which sequence a token is of, offsets on the host, what is searched."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from holdfast.kernels.conv.call import ConvCall
from holdfast.kernels.conv.torch.backend import convolve
from holdfast.nn.retnet import _positions
from holdfast.recurrences.mlstm import stabilizer
from holdfast.recurrences.packing import packed_beside


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets", [(0, 5), (0, 0, 2, 2, 3, 9, 9), (0, 16, 47, 48)])
def test_the_sequence_of_each_token(offsets, dtype):
    lengths = torch.tensor(offsets).diff()
    _, sequence = packed_beside(torch.empty(1, offsets[-1], 3), torch.tensor(offsets, dtype=dtype))
    assert sequence.tolist() == torch.arange(len(lengths)).repeat_interleave(lengths).tolist()


def _conv_on(device):
    call = ConvCall(torch.empty(1, 8, 3, device=device), torch.empty(3, 4, device=device))
    return convolve(call, torch.tensor([0, 3, 8]))


def _positions_on(device):
    return _positions(torch.empty(1, 8, 3, device=device), 2, None, torch.tensor([0, 3, 8]))


def _stabilizer_on(device):
    i, m = torch.empty(1, 8, 2, device=device), torch.empty(2, 2, device=device)
    return stabilizer(i, i, m, torch.tensor([0, 3, 8]))


@pytest.mark.parametrize("run", [_conv_on, _positions_on, _stabilizer_on])
def test_offsets_may_lie_on_the_host(run):
    """Beside tensors of another device, which need not be a GPU: PyTorch's operations refuse two of any kind."""
    for x in run("meta"):
        assert x.device.type == "meta"


def _conv(x, cu_seqlens):
    return convolve(ConvCall(x, torch.randn(3, 4)), cu_seqlens)[0]


def _stabilizer(x, cu_seqlens):
    return stabilizer(x, x, x.new_zeros(cu_seqlens.shape[0] - 1, 3), cu_seqlens)[0]


@pytest.mark.parametrize("run", [_conv, _stabilizer])
def test_no_slice_is_searched(run):
    """Inductor's search on a GPU takes a slice for all of the memory it lies in, so that every token is one sequence
    off (torch 2.11, pytorch#182343). Nothing of that is seen on a CPU, but the graph is the same."""
    graph = make_fx(run)(torch.randn(1, 48, 3), torch.tensor([0, 16, 47, 48])).graph
    searches = [node for node in graph.nodes if "searchsorted" in str(node.target)]
    views = ("slice", "view", "alias", "select", "as_strided")
    assert searches
    for search in searches:
        assert not any(view in str(search.args[0].target) for view in views), search.format_node()
