"""The step of a layer in PyTorch's own operations: float32, or float64 for float64 inputs, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.lru.torch.backend import input_scale, log_magnitude
from holdfast.kernels.rotary.torch.backend import rotate
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.recurrences.delta_rule import L2_EPS

from ..call import ConvStep, LayerStep, MLSTMStep, RetentionStep, RGLRUStep


class PyTorchLayerStep:
    """Every call, on every device that PyTorch has."""

    name = "pytorch"

    def reject(self, problem: Problem, device: Device) -> str | None:
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return (Candidate(Plan(self.name)),)

    def run(self, plan: Plan, call: LayerStep) -> Tensor:
        """y [B, 1, N] in the dtype of the call's first tensor; the call's states are updated."""
        run = {ConvStep: _conv, RetentionStep: _retention, MLSTMStep: _mlstm, RGLRUStep: _rglru}[type(call)]
        return run(call).to(call[0].dtype)[:, None]


def _conv(call: ConvStep) -> Tensor:
    wide = call.state.dtype
    _, heads, keys, values = call.state.shape
    widths = [call.heads * keys, call.heads * keys, heads * values]
    mixed = _convolved(call, wide)
    if call.delta:
        q, k, v = mixed.split(widths, -1)
    else:
        v, k, q = mixed.split(widths[::-1], -1)
    q, k = (x.unflatten(-1, (call.heads, keys)).repeat_interleave(heads // call.heads, 1) for x in (q, k))
    v = v.unflatten(-1, (heads, values))
    if call.delta:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
        q = q * keys**-0.5
    decay = dt = None
    if call.a is not None:
        dt = F.softplus(call.a[:, 0].to(wide) + call.dt_bias)
        decay = (-call.A_log.to(wide).exp() * dt).exp()[..., None]
    beta = call.largest * call.beta[:, 0].to(wide).sigmoid() if call.delta else dt
    o = _state_step(call.state, q, k, v, decay, beta, call.delta)
    if call.D is not None:
        o = o + call.D.to(wide)[:, None] * v
    if not call.delta:
        o = (o.flatten(1) * F.silu(call.gate[:, 0].to(wide))).unflatten(1, (-1, call.norm_weight.shape[-1]))
    y = _rms_norm(o, call.norm_weight, call.norm_eps)
    return y * F.silu(call.gate[:, 0].to(wide)) if call.delta and call.gate is not None else y


def _convolved(call: ConvStep, wide: torch.dtype) -> Tensor:
    """[B, C]; call.tail is updated."""
    rows = torch.cat([call.tail.to(wide), call.x.to(wide)], 1)
    weight = call.conv_weight.to(wide)
    z = torch.einsum("btc,ct->bc", rows[:, -weight.shape[1] :], weight)
    call.tail.copy_(rows[:, 1:])
    return F.silu(z if call.conv_bias is None else z + call.conv_bias)


def _retention(call: RetentionStep) -> Tensor:
    wide = call.state.dtype
    _, heads, keys, values = call.state.shape
    widths = [heads * keys, heads * keys, heads * values]
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in call.x[:, 0].to(wide).split(widths, -1))
    if call.position is None:
        decay = (F.logsigmoid(call.a[:, 0].to(wide)) / call.normalizer).exp().unflatten(-1, (heads, -1))
    else:
        q, k = (rotate(x[:, None], call.position[:, None], call.base)[:, 0] for x in (q, k))
        decay = 1 - torch.exp2(-5 - torch.arange(heads, device=q.device, dtype=wide))[:, None]
        call.position.add_(1)
    o = _state_step(call.state, q * keys**-0.5, k, v, decay, None, False)
    y = _rms_norm(o, call.norm_weight, call.norm_eps)
    return y if call.gate is None else y * F.silu(call.gate[:, 0].to(wide))


def _mlstm(call: MLSTMStep) -> Tensor:
    wide = call.C.dtype
    _, heads, keys, values = call.C.shape
    widths = [heads * keys, heads * keys, heads * values]
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in call.x[:, 0].to(wide).split(widths, -1))
    q = q * keys**-0.5
    pre = call.gates[:, 0].double()
    i, f = (call.cap * torch.tanh(pre / call.cap) if call.cap else pre).chunk(2, -1)
    log_f, floor = F.logsigmoid(f), torch.ones_like(i)
    if call.exponential:
        m = torch.maximum(log_f + call.m, i).to(wide)
        log_f, beta, floor = log_f + call.m - m, (i - m).exp(), (-m).exp()
        call.m.copy_(m)
    else:
        beta = i.sigmoid()
    decay, beta = log_f.exp().to(wide)[..., None], beta.to(wide)
    h = _state_step(call.C, q, k, v, decay, beta, False)
    if call.normalize:
        call.n.mul_(decay).add_(beta[..., None] * k)
        h = h / (torch.maximum((call.n * q).sum(-1).abs(), floor.to(wide)) + call.eps)[..., None]
    y = F.layer_norm(h, (values,), eps=call.norm_eps) * call.norm_weight
    return y.flatten(1) * torch.sigmoid(call.gate[:, 0].to(wide))


def _rglru(call: RGLRUStep) -> Tensor:
    wide = call.h.dtype
    r, i = (x.flatten(1).to(wide) for x in call.gates[:, 0].chunk(2, -1))
    log_a = log_magnitude(r, call.rate, call.decay_scale)
    write = input_scale(log_a) * i.sigmoid() * call.u[:, 0]
    call.h.mul_(log_a.exp()).add_(write)
    return call.h * F.gelu(call.z[:, 0].to(wide))


def _state_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, delta: bool
) -> Tensor:
    """o [B, H, V] of q, k [B, H, K], v [B, H, V], decay [B or none, H, K or 1], beta [B, H]; state is updated."""
    if decay is not None:
        state.mul_(decay[..., None])
    if delta:
        v = v - torch.einsum("bhkv,bhk->bhv", state, k)
    if beta is not None:
        k = k * beta[..., None]
    state.add_(k[..., None] * v[:, :, None])
    return torch.einsum("bhkv,bhk->bhv", state, q)


def _rms_norm(o: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[B, G, N] -> [B, G * N]."""
    return (o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * weight).flatten(1)
