"""The matrix and diagonal ops over the ranks of a group: each as in holdfast.ops, for this rank's tokens."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from holdfast import ops

from .calls import bind, why_dense_cannot
from .exchange import through_ranks
from .group import Layout, ranks_of

_ADDED = """

    Over ranks: q and the other arguments with an axis T hold this rank's tokens, parts of the whole in the order of the
    ranks, as long as they come; an empty part too. Other arguments are the same on every rank, and every rank calls.

    Args, beside those of `holdfast.{name}`, which are described there:
        group: a ProcessGroup, or a DeviceMesh of one axis, such as mesh["cp"].
        layout: "contiguous", or "zigzag" where the sequence is cut into twice as many parts as there are ranks and rank
            r holds the r-th and the r-th from the end, of equal length, end to end.
        initial_state: its row n is read on the rank that holds the first token of sequence n, without cu_seqlens the
            first; the others may give None.
        cu_seqlens: offsets of the sequences packed along all ranks' tokens, the same on every rank.

    Returns:
        This rank's output, and the final state or None: without cu_seqlens on every rank, where gradients into it add
        up; with it the rows of the sequences that end on this rank, and zeros in the other rows. mlstm's m with sigmoid
        gates and n without normalisation, which are not used, come back as zeros.

    Every rank has to run the backward pass if one does. Raises as `holdfast.{name}`, and ValueError for a group of
    another device, for parts whose batch, heads, dtype or cu_seqlens differ, and for cu_seqlens that do not go from 0
    to the tokens of all ranks; RuntimeError where another rank has gone."""


def _over_ranks(name: str) -> Callable[..., tuple[Tensor, Any]]:
    op = getattr(ops, name)
    signature = inspect.signature(op)
    keyword = inspect.Parameter.KEYWORD_ONLY
    group = inspect.Parameter("group", keyword, annotation=Any)
    layout = inspect.Parameter("layout", keyword, default="contiguous", annotation=Layout)

    def call(*arguments: Any, group: Any, layout: Layout = "contiguous", **named: Any) -> tuple[Tensor, Any]:
        bound = bind(op, arguments, named)
        ranks = ranks_of(group, layout, bound.call.lead.device)
        span = bound.call.with_wide_parameters()
        o, state = through_ranks(span, bound.initial_state, bound.output_final_state, bound.cu_seqlens, ranks)
        return o, None if state is None else bound.call.public(state)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"`holdfast.{name}` of a sequence that the ranks of a group hold in parts." + _ADDED.format(
        name=name
    )
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), group, layout])
    return call


def _refused(name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        raise ValueError(f"{name}: expected a recurrence that is linear in its state; {why_dense_cannot(name)}")

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Raises ValueError: the time of `holdfast.{name}` cannot be cut."
    return call


comba = _over_ranks("comba")
delta_rule = _over_ranks("delta_rule")
gated_delta_product = _over_ranks("gated_delta_product")
gated_delta_rule = _over_ranks("gated_delta_rule")
gdn2 = _over_ranks("gdn2")
kda = _over_ranks("kda")
gla = _over_ranks("gla")
hgrn = _over_ranks("hgrn")
lightning = _over_ranks("lightning")
linear_attention = _over_ranks("linear_attention")
mlstm = _over_ranks("mlstm")
retnet = _over_ranks("retnet")
rglru = _over_ranks("rglru")
rotlru = _over_ranks("rotlru")
rwkv7 = _over_ranks("rwkv7")
simple_gla = _over_ranks("simple_gla")
ssd = _over_ranks("ssd")

elman = _refused("elman")
gru = _refused("gru")
lstm = _refused("lstm")
rnn = _refused("rnn")
slstm = _refused("slstm")
