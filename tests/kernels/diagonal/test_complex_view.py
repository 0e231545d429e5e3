"""Pairs of channels as complex numbers, wherever in memory they begin."""

import pytest
import torch

import holdfast
from holdfast.kernels.diagonal import complex_view as pairs
from holdfast.recurrences import ROTLRU, Draw, Sizes
from parity import assert_close, op_and_oracle

# views of the same numbers: with an odd offset, channels apart, an odd stride between rows, expanded
LAYOUTS = {
    "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "channels apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "rows of an odd width": lambda x: torch.cat([x, x[..., :1]], -1)[..., :-1],
    "rows of an odd width, offset": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
    "turned": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [(2, 5), (1, 1)])
def test_pairs_of_any_layout(layout, dtype, rows):
    x = torch.randn(*rows, 6, dtype=dtype)
    view = LAYOUTS[layout](x)
    assert torch.equal(view, x)
    assert torch.equal(pairs.join(view), torch.complex(x[..., ::2], x[..., 1::2]))
    assert torch.equal(pairs.split(pairs.join(view)), x)


def test_contiguous_pairs_are_viewed():
    x = torch.randn(2, 5, 6)
    assert pairs.join(x).data_ptr() == x.data_ptr()


@layouts
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_rotlru_takes_arguments_and_gradients_of_any_layout(layout, packed, backend):
    arguments = ROTLRU.example(Draw(0, torch.float64), Sizes(B=1 if packed else 2, T=9, D=6))
    options = {"backend": backend}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 4, 9])
        arguments["initial_state"] = Draw(1, torch.float64).state(2, 6)
    _, exact = op_and_oracle(holdfast.rotlru, ROTLRU, arguments, **options)

    leaves = {name: x.detach().requires_grad_() for name, x in arguments.items()}
    made = holdfast.rotlru(
        **{name: LAYOUTS[layout](x) for name, x in leaves.items()}, output_final_state=True, **options
    )
    draw = torch.Generator().manual_seed(1)
    cotangents = [LAYOUTS[layout](torch.randn(x.shape, generator=draw, dtype=torch.float64)) for x in made]
    grads = torch.autograd.grad(made, list(leaves.values()), cotangents)
    assert_close([x.detach() for x in (*made, *grads)], exact, 1e-9)
