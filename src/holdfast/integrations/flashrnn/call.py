"""flashrnn: LSTM, GRU, Elman network and sLSTM of gates that are computed beforehand."""

from functools import partial

import torch
from torch import Tensor

from holdfast.ops.autocast import without_autocast
from holdfast.ops.check import check_arguments
from holdfast.recurrences.definition import Argument

from .config import DTYPES, IN_CUDA, FlashRNNConfig
from .functions import Function, function_named
from .layouts import BIAS, INPUT, OUTPUT, RECURRENT, turned
from .states import States

_ARGUMENTS = {
    "Wx": Argument("the inputs' part of the gates, pre-activation", "B T input_gates H D"),
    "R": Argument("recurrent weights (out, in)", "recurrent_gates H D D"),
    "b": Argument("bias of the gates", "gates H D"),
    "states": Argument("states before the first step", "states B 1 H D", "float", required=False),
}


def flashrnn(
    Wx: Tensor,
    R: Tensor,
    b: Tensor,
    states: Tensor | None = None,
    function: str = "lstm",
    config: FlashRNNConfig | None = None,
    backend: str = "cuda_fused",
    dtype: str = "bfloat16",
) -> tuple[Tensor | States, Tensor]:
    """`holdfast.lstm`, `gru`, `elman` or `slstm`, by the backend that should be fastest.

    Args:
        Wx: [B, T, gates, H, D], gates i, f, z, o of lstm and slstm, r, z, n of gru, one of elman.
        R: [gates, H, D, D] (out, in), of Wx's dtype; of gru g, r, z, where g is the recurrent part of the candidate.
        b: [gates, H, D], of Wx's dtype; of gru g, r, z, n.
        states: [S, B, 1, H, D], any floating dtype: h, of lstm c too, of slstm c, n and m, where n is at least 1, or c
            and n are 0; that is read on the host, but not in graphs of torch.compile and of CUDA. Zeros by default.
        function: "lstm", "gru", "elman" or "slstm".
        config: says all this and more, in place of function, backend and dtype.
        backend, dtype: how flashrnn's kernels go about it; checked, not used.

    Returns:
        The states after each token [S, B, T, H, D] and after the last one [S, B, 1, H, D], in Wx's dtype. Where there
        are several, the first is a `States`: its [0], h, is there, and the others are found when they are asked for.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message, and for what
            is not served.
    """
    is_told = config is not None
    if config is None:
        config = FlashRNNConfig(backend, function, dtype="bfloat16" if dtype is None else dtype)
    elif not isinstance(config, FlashRNNConfig):
        raise TypeError(f"config: expected a FlashRNNConfig of holdfast.integrations; got {type(config).__name__}")
    which, given = function_named(config.function), _arranged(config, Wx, R, b, states, is_told)
    sizes = {"states": which.states, "input_gates": which.input_gates, "recurrent_gates": which.recurrent_gates}
    Wx, R, b, states = check_arguments(_ARGUMENTS, None, given, sizes | {"gates": which.gates, "1": 1}).values()
    if is_told and (config.num_heads, config.head_dim) != Wx.shape[3:]:
        found = f"num_heads = {config.num_heads} and head_dim = {config.head_dim}"
        raise ValueError(f"config: expected the heads and channels of Wx, {list(Wx.shape[3:])}; got {found}")
    R, b = which.weights(R, b)
    before = _before(config, Wx, states)
    clip, cut = config.gradient_recurrent_clipval, config.gradient_recurrent_cut
    h, last = which.op(Wx, R, b, before, output_final_state=True, recurrent_grad_clip=clip, cut_recurrent_grad=cut)
    last, h_out = turned(last.to(Wx.dtype)[:, :, None], OUTPUT, config.output_shape), _behind(config, h)
    if which.later_states is None:
        return h_out[None], last
    return States(h_out, which.states, partial(_others, config, which, Wx, R, b, before, h)), last


def _arranged(
    config: FlashRNNConfig, Wx: Tensor, R: Tensor, b: Tensor, states: Tensor | None, is_told: bool
) -> dict[str, Tensor | None]:
    """The tensors in the layouts of `_ARGUMENTS`, and in the dtypes that a config which was given tells."""
    given = {
        "Wx": (Wx, config.input_shape, INPUT, config.dtype_w),
        "R": (R, config.recurrent_shape, RECURRENT, config.dtype_r),
        "b": (b, config.bias_shape, BIAS, config.dtype_b),
        "states": (states, config.output_shape, OUTPUT, config.dtype_s),
    }
    casts = is_told and config.enable_automatic_mixed_precision and config.backend in IN_CUDA
    arranged = {}
    for name, (x, layout, wanted, dtype) in given.items():
        if isinstance(x, Tensor) and x.dim() == len(layout):
            x = turned(x.to(DTYPES[dtype]) if casts else x, layout, wanted)
        arranged[name] = x
    return arranged


def _before(config: FlashRNNConfig, Wx: Tensor, states: Tensor | None) -> Tensor | None:
    """States [S, B, H, D] before the first step, as the ops take them; None for zeros."""
    wide = torch.promote_types(Wx.dtype, torch.float32)
    if states is None:
        values = config.initial_val
        if values == 0:
            return None
        values = [values] * config.num_states if isinstance(values, int | float) else list(values)
        if len(values) != config.num_states:
            raise ValueError(f"initial_val: expected a number, or one for each of {config.num_states} states; "
                             f"got {len(values)}")  # fmt: skip
        batch, _, _, heads, width = Wx.shape
        before = torch.tensor(values, dtype=wide, device=Wx.device).view(-1, 1, 1, 1)
        before = before.expand(-1, batch, heads, width)
    else:
        before = states[:, :, 0].to(wide)
    if config.function == "slstm":
        _check_normalizer(before[1], before[2])
    return before


def _check_normalizer(c: Tensor, n: Tensor) -> None:
    """Raises ValueError for n between 0 and 1, which flashrnn raises to 1 behind the next step, and for c beside an n
    of 0, which it weighs by m: no op does either. No state that a step has left behind is like that."""
    if torch.compiler.is_compiling() or (n.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    is_small, is_left = (n != 0) & ~(n >= 1), (n == 0) & (c != 0)
    if (is_small | is_left).any():
        expected = "c of slstm to be 0 wherever n is 0, and n at least 1 elsewhere"
        raise ValueError(
            f"states: expected {expected}; got n = {n[is_small].tolist()[:1]}, c = {c[is_left].tolist()[:1]}"
        )


def _others(
    config: FlashRNNConfig, which: Function, Wx: Tensor, R: Tensor, b: Tensor, before: Tensor | None, h: Tensor
) -> tuple[Tensor, ...]:
    """The states beside h, each as h is returned."""
    if config.gradient_recurrent_clipval is not None and torch.is_grad_enabled() and h.requires_grad:
        raise ValueError("gradient_recurrent_clipval: expected None for gradients of states beside h, whose way "
                         f"through h has its own clip; got {config.gradient_recurrent_clipval}")  # fmt: skip
    wide = torch.promote_types(Wx.dtype, torch.float32)
    if before is None:
        before = h.new_zeros(which.states, len(h), *h.shape[2:], dtype=wide)
    with without_autocast(h):
        entering = torch.cat([before[0][:, None], h.to(wide)], 1)[:, :-1]
        entering = entering.detach() if config.gradient_recurrent_cut else entering
        gates = Wx.to(wide) + torch.einsum("bthp,ghdp->btghd", entering, R.to(wide)) + b.to(wide)
        return tuple(_behind(config, x.to(h.dtype)) for x in which.later_states(gates, before))


def _behind(config: FlashRNNConfig, x: Tensor) -> Tensor:
    """[B, T, H, D] in the order that states have behind their first axis."""
    return turned(x, OUTPUT[1:], config.output_shape[1:])
