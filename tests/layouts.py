"""The same numbers in other memory, and numbers that must not meet: what kernels of every family are held to."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from parity import relative_error

Results = dict[str, Tensor]
Run = Callable[[Any, Tensor, Tensor], Results]


def view_of(x: Tensor | None, kind: int) -> Tensor | None:
    """x as every other number of a wider tensor, as a part that begins at an odd place, or with its last two axes
    the other way round in memory; what is beside it is NaN."""
    if x is None:
        return None
    # one axis has no other way round
    if kind % 3 == 0 or (kind % 3 == 2 and x.dim() == 1):
        return torch.stack((torch.full_like(x, torch.nan), x), -1).flatten(-2)[..., 1::2]
    if kind % 3 == 1:
        # strides are multiples of 16, so that the place alone is odd
        return torch.nn.functional.pad(x, (1, -(x.shape[-1] + 1) % 16), value=torch.nan)[..., 1 : 1 + x.shape[-1]]
    return x.mT.contiguous().mT


def views(call: Any, first: int) -> Any:
    """A call, a named tuple, with views of its tensors: of one kind after another, from first on."""
    return call._replace(
        **{name: view_of(x, first + n) for n, (name, x) in enumerate(call._asdict().items()) if isinstance(x, Tensor)}
    )


def assert_views_are_alike(run: Run, call: Any, grad_state: Tensor, limit: float = 0.0) -> None:
    """Views give the bits of their copies, and so does a gradient that is one row for all tokens.

    run: (call, gradients of the output and of the final state) -> results by name. call: with v, or x, shaped as the
    output. limit: relative error, where a kernel is compiled anew for other alignments, and may add in another order.
    """
    like = getattr(call, "v", None)
    like = call.x if like is None else like
    row = torch.randn(like.shape[-1], generator=torch.Generator().manual_seed(0)).to(like)
    grad_o = row.expand(like.shape)
    right = run(call, grad_o.contiguous(), grad_state)
    assert all(not x.isnan().any() for x in right.values())
    for kind in range(3):
        got = run(views(call, kind), grad_o, view_of(grad_state, kind))
        assert got.keys() == right.keys()
        for name, x in got.items():
            assert relative_error(x, right[name]) <= limit, (name, kind)


def assert_nan_stays(
    run: Run, call: Any, offsets: Sequence[int], which: int, cotangents: tuple[Tensor, Tensor]
) -> None:
    """NaN in all that one packed sequence has, its state and gradients too, changes no bit of the others'.

    run: as of assert_views_are_alike, packed at the offsets. Tensors are [1, T, ..] or, of states, [N, ..]; of results
    those named "..state" are.
    """
    begin, end = offsets[which], offsets[which + 1]

    def spoilt(x: Tensor, is_state: bool) -> Tensor:
        x = x.clone()
        x[slice(which, which + 1) if is_state else (slice(None), slice(begin, end))] = torch.nan
        return x

    given = {name: spoilt(x, name == "initial_state") for name, x in call._asdict().items() if isinstance(x, Tensor)}
    good = run(call, *cotangents)
    bad = run(call._replace(**given), spoilt(cotangents[0], False), spoilt(cotangents[1], True))
    for name, x in bad.items():
        others = torch.ones(x.shape[0] if name.endswith("state") else x.shape[1], dtype=torch.bool)
        others[slice(which, which + 1) if name.endswith("state") else slice(begin, end)] = False
        pair = (y[others] if name.endswith("state") else y[:, others] for y in (x, good[name]))
        assert torch.equal(*pair), name
    assert bad["o"][:, begin:end].isnan().all()
