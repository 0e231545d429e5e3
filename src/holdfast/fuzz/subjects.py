"""What is fuzzed: each op, its arguments, the loop that it is held against and its path in plain PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast import ops
from holdfast.ops import dense, diagonal, matrix, selective
from holdfast.ops.causal_conv1d import BACKENDS as CONV_BACKENDS
from holdfast.ops.gated_rms_norm import BACKENDS as NORM_BACKENDS
from holdfast.ops.inter_chunk_scan import BACKENDS as INTER_BACKENDS
from holdfast.ops.intra_chunk import BACKENDS as INTRA_BACKENDS
from holdfast.recurrences.cell import cell

from . import (
    drawn_matrix,
    drawn_others,
    exact_dense,
    exact_diagonal,
    exact_matrix,
    exact_parts,
    exact_selective,
    exact_two_keys,
)
from .scenario import Scenario
from .source import Source, Value


@dataclass(frozen=True)
class Subject:
    """family: "matrix", "dense", "diagonal", "selective", "inter", "intra", "norm" or "conv".

    draw: scenario and source -> values by argument. exact: (rows, tensors by argument, options) -> output and parts of
    the final state, in float64. results: their names. pytorch: the backend in plain PyTorch.
    """

    family: str
    draw: Callable[[Scenario, Source], dict[str, Value]]
    exact: Callable[..., tuple[Tensor, ...]]
    results: tuple[str, ...]
    pytorch: str


@cell(states=("h", "c"), gates=("f", "z", "o"), input=("f", "z", "o"), recurrent=("f", "z"))
def own_cell(s: Any, g: Any) -> dict[str, Tensor]:
    """A cell that is none of the library's, with an output gate that sees no state."""
    f = torch.sigmoid(g.f)
    c = f * s.c + (1 - f) * torch.tanh(g.z)
    return {"h": torch.sigmoid(g.o) * c, "c": c}


_O = ("o", "final")
SUBJECTS: dict[str, Subject] = {
    name: Subject("matrix", draw, getattr(exact_matrix, name), _O, "chunked")
    for name, draw in {
        "linear_attention": drawn_matrix.linear_attention,
        "retnet": drawn_matrix.linear_attention,
        "lightning": drawn_matrix.linear_attention,
        "simple_gla": drawn_matrix.simple_gla,
        "gla": drawn_matrix.gla,
        "ssd": drawn_matrix.ssd,
        "delta_rule": drawn_matrix.delta_rule,
        "gated_delta_rule": drawn_matrix.gated_delta_rule,
        "kda": drawn_matrix.kda,
    }.items()
}
SUBJECTS |= {
    name: Subject("matrix", getattr(drawn_matrix, name), getattr(exact_two_keys, name), _O, "chunked")
    for name in ("gdn2", "comba", "gated_delta_product", "rwkv7")
}
SUBJECTS["mlstm"] = Subject("matrix", drawn_matrix.mlstm, exact_matrix.mlstm, ("o", "C", "n", "m"), "chunked")
SUBJECTS |= {
    name: Subject("dense", drawn_others.dense, getattr(exact_dense, name), _O, "loop") for name in drawn_others.COUNTS
}
SUBJECTS |= {
    name: Subject("diagonal", getattr(drawn_others, name), getattr(exact_diagonal, name), _O, "chunked")
    for name in ("rglru", "rotlru", "hgrn")
}
SUBJECTS["mamba1"] = Subject("selective", drawn_others.mamba1, exact_selective.mamba1, _O, "chunked")
SUBJECTS["inter_chunk_scan"] = Subject(
    "inter", drawn_others.inter_chunk_scan, exact_diagonal.inter_chunk_scan, _O, "chunked"
)
SUBJECTS["intra_chunk"] = Subject("intra", drawn_others.intra_chunk, exact_parts.intra_chunk, ("o",), "chunked")
SUBJECTS["gated_rms_norm"] = Subject("norm", drawn_others.gated_rms_norm, exact_parts.gated_rms_norm, ("o",), "pytorch")

SUBJECTS["causal_conv1d"] = Subject("conv", drawn_others.causal_conv1d, exact_parts.causal_conv1d, _O, "pytorch")

_OPTIONS: dict[str, tuple[str, Any]] = {
    "l2": ("qk_l2norm", True),
    "sig": ("beta_sigmoid", True),
    "neg": ("allow_neg_eigval", True),
    "softplus": ("dt_softplus", True),
    "sigmoid": ("gating", "sigmoid"),
    "unnormalized": ("normalize", False),
    "relu": ("nonlinearity", "relu"),
    "clip": ("recurrent_grad_clip", 0.05),
    "cut": ("cut_recurrent_grad", True),
    "scale": ("scale", 0.3),
    "bound": ("lower_bound", -5.0),
    "layer": ("layer", 2),
    "eps": ("eps", 1e-3),
    "opened": ("gate_activation", "sigmoid"),
    "activation": ("activation", "sigmoid"),
    "silu": ("activation", "silu"),
    "center": ("center", True),
}


def options(s: Scenario) -> dict[str, Any]:
    """The keyword options of the op that are no tensors."""
    found = dict(_OPTIONS[word] for word in s.options if word in _OPTIONS)
    if "layer" in found:
        found["num_layers"] = 5
    if s.op == "intra_chunk":
        found["chunk_size"] = s.chunk
    return found


def bind(s: Scenario, backend: str | None = None) -> Callable[[dict[str, Tensor], Tensor | None], Any]:
    """The op as a function of its tensors and offsets, simple enough to compile. backend: instead of the scenario's."""
    family, op, constants = SUBJECTS[s.op].family, getattr(ops, s.op), _constants(s, backend)
    is_walk, is_inner, has_parts = "output_final_state" in constants, family == "intra", s.op == "mlstm" and s.state

    def call(tensors: dict[str, Tensor], cu: Tensor | None) -> Any:
        given: dict[str, Any] = dict(tensors)
        if has_parts:
            given["initial_state"] = (given.pop("C"), given.pop("n"), given.pop("m"))
        if is_walk:
            given["cu_seqlens"] = cu
        elif is_inner:
            given.setdefault("g", None)
        return op(**given, **constants)

    return call


def call_with(s: Scenario, given: dict[str, Any]) -> Any:
    """The op with whatever is given, in place of its options too."""
    given = _constants(s, None) | ({"g": None} if s.op == "intra_chunk" else {}) | given
    if s.op == "mlstm" and s.state:
        given["initial_state"] = (given.pop("C"), given.pop("n"), given.pop("m"))
    return getattr(ops, s.op)(**given)


def _constants(s: Scenario, backend: str | None) -> dict[str, Any]:
    """The arguments that are no tensors."""
    constants, backend = options(s), backend or s.backend
    constants["backend"] = None if backend == "default" else backend
    if s.op == "rnn":
        constants["cell"] = own_cell
    if SUBJECTS[s.op].family not in ("intra", "norm"):
        constants["output_final_state"] = s.final
    return constants


def named(s: Scenario, returned: Any) -> dict[str, Tensor]:
    """What the op returned: its output and the parts of the final state, where asked for, by name."""
    if isinstance(returned, Tensor):
        return {"o": returned}
    o, final = returned
    if final is None:
        return {"o": o}
    parts = final if isinstance(final, tuple) else (final,)
    return {"o": o, **dict(zip(SUBJECTS[s.op].results[1:], parts, strict=True))}


def backends(op: str) -> tuple[str, ...]:
    """The backends of an op by name, in the order in which they are tried."""
    return tuple(each.name for each in _BACKENDS[SUBJECTS[op].family])


_BACKENDS = {
    "matrix": matrix.BACKENDS,
    "dense": dense.BACKENDS,
    "diagonal": diagonal.BACKENDS,
    "selective": selective.BACKENDS,
    "inter": INTER_BACKENDS,
    "intra": INTRA_BACKENDS,
    "norm": NORM_BACKENDS,
    "conv": CONV_BACKENDS,
}
