"""Which mixers are measured: Holdfast's, attention, and other libraries'."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from holdfast import nn as hnn

from ...language_model import TorchLikeMixer
from ..peers.fla import lift_refusal
from .attention import Attention


@dataclass(frozen=True)
class Mixer:
    """make: (width, head, narrow) -> the layer, forward(x, state) -> (y, state); head and narrow as Scale has them.

    defaults: width -> the layer as its constructor makes it, where that is another. op: of Holdfast, which the layer is
    made around. exact: whether its float64 copy by plain PyTorch says what is right; without one, results have only to
    be finite. steps: whether it takes a state. long: whether it is measured at longer sequences too. note: what
    differs.
    """

    name: str
    make: Callable[[int, int, int], nn.Module]
    defaults: Callable[[int], nn.Module] | None = None
    op: str = ""
    exact: bool = True
    steps: bool = True
    long: bool = True
    note: str = ""


class _FirstOutput(nn.Module):
    """The output alone of a layer that takes no state here."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, state: None = None) -> tuple[Tensor, None]:
        y = self.layer(x)
        return (y[0] if isinstance(y, tuple) else y), None


def _fla(layer: str, **sizes: Any) -> nn.Module:
    lift_refusal()
    return _FirstOutput(getattr(import_module("fla.layers"), layer)(**sizes, layer_idx=0))


_FLA: dict[str, Any] = {
    "exact": False,
    "steps": False,
    "note": "its own refusal of this Triton is off; results are finite, and not compared",
}

MIXERS = (
    Mixer("attention", lambda w, head, narrow: Attention(w, w // narrow)),
    Mixer(
        "gated_delta_net",
        lambda w, head, narrow: hnn.GatedDeltaNet(w, num_heads=w // head, head_dim=head, expand_v=1),
        hnn.GatedDeltaNet,
        "gated_delta_rule",
    ),
    Mixer("delta_net", lambda w, head, narrow: hnn.DeltaNet(w, num_heads=w // head), hnn.DeltaNet, "delta_rule"),
    Mixer(
        "gated_delta_product",
        lambda w, head, narrow: hnn.GatedDeltaProduct(w, num_heads=w // head, head_dim=head, expand_v=1),
        hnn.GatedDeltaProduct,
        "gated_delta_product",
    ),
    Mixer("kda", lambda w, head, narrow: hnn.KDA(w, num_heads=w // head), hnn.KDA, "kda"),
    Mixer("rwkv7", lambda w, head, narrow: hnn.RWKV7(w, num_heads=w // narrow), hnn.RWKV7, "rwkv7"),
    Mixer("mamba1", lambda w, head, narrow: hnn.Mamba(w), op="mamba1"),
    Mixer("mamba2", lambda w, head, narrow: hnn.Mamba2(w, num_heads=2 * w // narrow, d_state=head), op="ssd"),
    Mixer("gla", lambda w, head, narrow: hnn.GLA(w, num_heads=w // head, expand_k=0.5), hnn.GLA, "gla"),
    Mixer("mlstm", lambda w, head, narrow: hnn.MLSTM(w, num_heads=w // head, expand_k=1), hnn.MLSTM, "mlstm"),
    Mixer("retnet", lambda w, head, narrow: hnn.RetNet(w, num_heads=w // head, expand_v=1), hnn.RetNet, "retnet"),
    Mixer("rglru", lambda w, head, narrow: hnn.RGLRU(w), op="rglru"),
    Mixer("rotlru", lambda w, head, narrow: hnn.RotLRU(w), op="rotlru"),
    Mixer("slstm", lambda w, head, narrow: hnn.SLSTM(w, num_heads=w // narrow), hnn.SLSTM, "slstm"),
    Mixer("lstm", lambda w, head, narrow: TorchLikeMixer(hnn.LSTM, w, w // narrow), op="lstm"),
    Mixer(
        "torch lstm",
        lambda w, head, narrow: nn.LSTM(w, w, batch_first=True),
        long=False,
        note="one head as wide as the model",
    ),
    Mixer(
        "fla gated_delta_net",
        lambda w, head, narrow: _fla("GatedDeltaNet", hidden_size=w, num_heads=w // head, head_dim=head, expand_v=1),
        **_FLA,
    ),
    Mixer(
        "fla gla",
        lambda w, head, narrow: _fla("GatedLinearAttention", hidden_size=w, num_heads=w // head, expand_k=0.5),
        **_FLA,
    ),
    Mixer(
        "fla mamba2",
        lambda w, head, narrow: _fla(
            "Mamba2", hidden_size=w, num_heads=2 * w // narrow, head_dim=narrow, state_size=head, use_bias=False
        ),
        **_FLA,
    ),
)


def chosen(texts: list[str]) -> list[Mixer]:
    """Those whose names hold one of the texts, and attention before them, which they are held against."""
    return [each for each in MIXERS if each.name == "attention" or any(text in each.name for text in texts)]


def op_sizes(layer: nn.Module) -> dict[str, int]:
    """Heads and widths of the op inside one of Holdfast's layers, as the bench's cases name them."""
    layer = layer.layer if isinstance(layer, TorchLikeMixer) else layer
    if isinstance(layer, hnn.Mamba2):
        return {"H": layer.num_heads, "Hq": layer.n_groups, "K": layer.d_state, "V": layer.head_dim}
    if isinstance(layer, hnn.Mamba):
        return {"D": layer.inner, "N": layer.d_state}
    if hasattr(layer, "key_dim"):
        return {"H": layer.num_heads, "K": layer.key_dim, "V": layer.value_dim}
    if hasattr(layer, "head_dim"):
        return {"H": layer.num_heads, "D": layer.head_dim}
    return {"D": layer.width}
