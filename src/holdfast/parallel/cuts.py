"""How each mixer of holdfast.nn is cut by heads: its parameters over ranks, and the numbers that a part has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from holdfast.nn import (
    GLA,
    KDA,
    MLSTM,
    RGLRU,
    RWKV7,
    SLSTM,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaProduct,
    Mamba2,
    RetNet,
    RotLRU,
)
from holdfast.nn.in_projection import PIECE
from holdfast.nn.stack import Stack

from .sections import Sections

# what a rank has of a module's number: an equal share, its shares of sections' widths, or what (rank, ranks) gives
Number = int | Sections | Callable[[int, int], Any]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a module is cut over ranks.

    parameters: name -> `Shard`, or `Sections` of the rows of a packed one; every rank has all of those not named.
    heads: attribute -> number of heads in the whole module, of which every rank gets as many. groups: the same of heads
    that several ranks may have alike, where there are fewer of them than ranks. numbers: attribute -> what follows
    from these. spanning_norm: the module `norm` takes a mean over the channels of all ranks.
    """

    parameters: Mapping[str, Placement | Sections]
    heads: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    numbers: Mapping[str, Number] = field(default_factory=dict)
    spanning_norm: bool = False


OUT = {"out_proj.weight": Shard(1)}


def _packed(widths: list[int], heads: list[int]) -> Sections:
    """Of an `InProjection`."""
    return Sections(tuple(widths), tuple(heads), PIECE)


def _gla(mixer: GLA) -> Cut:
    # every rank has all of the decay at its rank
    sections = _packed(mixer.widths, 4 * [mixer.num_heads] + [1])
    parameters = OUT | {"in_proj.weight": sections, "decay_up.weight": Shard(0), "decay_up.bias": Shard(0)}
    return Cut(parameters, {"num_heads": mixer.num_heads}, numbers={"widths": sections})


def _retnet(mixer: RetNet) -> Cut:
    heads = mixer.num_heads
    sections = Sections(tuple(mixer.widths), 4 * (heads,))
    numbers = {"widths": sections, "first_head": lambda rank, ranks: rank * heads // ranks}
    return Cut(OUT | {"in_proj.weight": sections}, {"num_heads": heads}, numbers=numbers)


def _mlstm(mixer: MLSTM) -> Cut:
    heads = mixer.num_heads
    sections = _packed([*mixer.widths[:4], heads, heads], 6 * [heads])
    parameters = {"in_proj.weight": sections, "gate_bias": Sections((heads, heads), (heads, heads))}
    numbers = {"widths": _packed(mixer.widths, 5 * [heads])}
    return Cut(OUT | parameters | {"norm.weight": Shard(0)}, {"num_heads": heads}, numbers=numbers)


def _mamba2(mixer: Mamba2) -> Cut:
    heads, groups, (inner, written, _) = mixer.num_heads, mixer.n_groups, mixer.conv_widths
    conv = Sections((inner, written, written), (heads, groups, groups))
    # one norm over all channels, or groups of channels as there are of B and C
    spans = groups == 1
    parameters = {
        "in_proj.weight": _packed([inner, inner, written, written, heads], [heads, heads, groups, groups, heads]),
        "conv.weight": conv,
        "conv.bias": conv,
        **dict.fromkeys(("A_log", "D", "dt_bias"), Shard(0)),
        "norm.weight": Shard(1 if spans else 0),
    }
    numbers = {
        "widths": lambda rank, ranks: [inner // ranks, sum(conv.local(ranks)), heads // ranks],
        "conv_widths": conv,
        "conv.channels": _total(conv),
    }
    counts = {"num_heads": heads}, {"n_groups": groups}
    if not spans:
        counts = counts[0] | counts[1], {}
    return Cut(OUT | parameters, *counts, numbers, spans)


def _delta_net(mixer: DeltaNet) -> Cut:
    heads = mixer.num_heads
    sections = _packed(mixer.widths, 4 * [heads])
    conv = Sections(tuple(mixer.widths[:3]), 3 * (heads,))
    numbers = {"widths": sections, "conv.channels": _total(conv)}
    return Cut(OUT | {"in_proj.weight": sections, "conv.weight": conv}, {"num_heads": heads}, numbers=numbers)


def _gated_delta_net(mixer: GatedDeltaNet) -> Cut:
    groups, heads = mixer.num_heads, mixer.num_v_heads
    sections = _packed(mixer.widths, [groups, groups, *4 * [heads]])
    conv = Sections(tuple(mixer.widths[:3]), (groups, groups, heads))
    parameters = {"in_proj.weight": sections, "conv.weight": conv, "A_log": Shard(0), "dt_bias": Shard(0)}
    numbers = {"widths": sections, "conv.channels": _total(conv)}
    return Cut(OUT | parameters, {"num_v_heads": heads}, {"num_heads": groups}, numbers)


def _gated_delta_product(mixer: GatedDeltaProduct) -> Cut:
    groups, heads, steps = mixer.num_heads, mixer.num_v_heads, mixer.num_householder
    keys, values = groups * mixer.key_dim, heads * mixer.value_dim
    # a token's writes one behind another, each of all heads
    widths, counts = [keys, *steps * [keys], *steps * [values]], [groups, *steps * [groups], *steps * [heads]]
    conv = Sections(tuple(widths), tuple(counts))
    behind = [values, *steps * [heads], *([heads] if mixer.forget_gate else [])]
    parameters = {"in_proj.weight": _packed(widths + behind, counts + len(behind) * [heads]), "conv.weight": conv}
    if mixer.forget_gate:
        parameters |= {"A_log": Shard(0), "dt_bias": Shard(0)}
    numbers = {"conv.channels": _total(conv)}
    return Cut(OUT | parameters, {"num_v_heads": heads}, {"num_heads": groups}, numbers)


def _kda(mixer: KDA) -> Cut:
    groups, heads = mixer.num_heads, mixer.num_v_heads
    # every rank has all of the decay and of the output gate at their rank
    sections = _packed(mixer.widths, [groups, groups, heads, 1, 1, heads])
    conv = Sections(tuple(mixer.widths[:3]), (groups, groups, heads))
    parameters = {"in_proj.weight": sections, "conv.weight": conv}
    parameters |= dict.fromkeys(("decay_up.weight", "gate_up.weight", "gate_up.bias", "A_log", "dt_bias"), Shard(0))
    numbers = {"widths": sections, "conv.channels": _total(conv)}
    return Cut(OUT | parameters, {"num_v_heads": heads}, {"num_heads": groups}, numbers)


def _rwkv7(mixer: RWKV7) -> Cut:
    if mixer.residual is not None:
        raise ValueError(
            f"RWKV7: expected the first layer, whose values are its own; got layer {mixer.layer}, and a rank has not "
            "the first one's values"
        )
    # every rank has all of the low ranks, and of the shares of the token before
    names = [f"{name}_proj.weight" for name in "rkv"] + [f"{name}.up.weight" for name in ("decay", "rate", "gate")]
    names += ["decay.up.bias", "rate.up.bias", "k_k", "k_a", "r_k", "norm.weight", "norm_bias"]
    return Cut(OUT | dict.fromkeys(names, Shard(0)), {"num_heads": mixer.num_heads})


def _lru(mixer: RGLRU | RotLRU) -> Cut:
    heads = mixer.num_heads
    parameters = {"in_proj.weight": Sections((mixer.width, mixer.width), (heads, heads))}
    parameters |= dict.fromkeys(("gates.weight", "gates.bias", "rate"), Shard(0))
    if isinstance(mixer, RotLRU):
        parameters["phase"] = Shard(0)
    return Cut(OUT | parameters, {"num_heads": heads}, numbers={"gates.heads": heads, "width": mixer.width})


def _slstm(mixer: SLSTM) -> Cut:
    sections = Sections(4 * (mixer.d_model,), 4 * (mixer.num_heads,))
    parameters = {"in_proj.weight": sections, "R": Shard(1), "b": Shard(1), "norm.weight": Shard(0)}
    return Cut(OUT | parameters, {"num_heads": mixer.num_heads})


def _stack(layers: Stack) -> Cut:
    rows = Sections(layers.gates * (layers.hidden_size,), layers.gates * (layers.num_heads,))
    names = (name for name, _ in layers.named_parameters())
    return Cut(dict.fromkeys(names, rows), {"num_heads": layers.num_heads}, numbers={"hidden_size": layers.hidden_size})


def _total(sections: Sections) -> Callable[[int, int], int]:
    return lambda rank, ranks: sum(sections.local(ranks))


_CUTS: dict[type[nn.Module], Callable[..., Cut]] = {
    GLA: _gla,
    RetNet: _retnet,
    Mamba2: _mamba2,
    MLSTM: _mlstm,
    DeltaNet: _delta_net,
    GatedDeltaNet: _gated_delta_net,
    GatedDeltaProduct: _gated_delta_product,
    KDA: _kda,
    RWKV7: _rwkv7,
    RGLRU: _lru,
    RotLRU: _lru,
    SLSTM: _slstm,
    Stack: _stack,
}
MIXERS = tuple(_CUTS)


def cut_of(mixer: nn.Module) -> Cut:
    """That of a mixer of holdfast.nn, or of a subclass of one."""
    return next(cut(mixer) for kind, cut in _CUTS.items() if isinstance(mixer, kind))
