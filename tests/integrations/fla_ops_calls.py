"""Holdfast's ops by fla's names beside fla's own: calls of `fla_calls`."""

import inspect
from importlib import import_module

import torch
import torch.nn.functional as F

from holdfast.integrations.fla import ops

B, T, H, K, V = 2, 20, 3, 16, 8


def _assert_close(found, right):
    for got, wanted in zip(found, right, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-5)


def ops_by_name_have_flas_signatures():
    for name in ops.__all__:
        ours = inspect.signature(getattr(ops, name)).parameters.values()
        module = import_module(f"fla.ops.{getattr(ops, name).__module__.rpartition('.')[2]}")
        theirs = inspect.signature(getattr(module, name)).parameters.values()
        assert [(each.name, each.default) for each in ours if each.kind is not each.KEYWORD_ONLY] == [
            (each.name, each.default) for each in theirs if each.kind is not each.VAR_KEYWORD
        ], name


def ops_by_name_are_flas_step_loops():
    """Those that fla has a loop of; q and k have the heads of v, as there."""
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.hgrn.naive import naive_recurrent_hgrn
    from fla.ops.kda.naive import naive_recurrent_kda
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn
    from fla.ops.retention.naive import naive_retention
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    draw = torch.Generator().manual_seed(1)
    q, k, v, wide, state = (
        torch.randn(shape, generator=draw)
        for shape in ((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H, K), (B, H, K, V))
    )
    k, wide = F.normalize(k, dim=-1), F.logsigmoid(wide)
    g, beta = wide[..., 0], wide[..., 1].exp()
    ends = {"initial_state": state, "output_final_state": True}
    first = {"q": q, "k": k, "v": v}

    def turned(x):
        return x.transpose(1, 2)

    o, last = delta_rule_recurrence(*map(turned, (q, k, v, beta)), state)
    loops = {
        "simple_gla": ({"g": g}, naive_recurrent_simple_gla(**first, g=g, **ends)),
        "gla": ({"g": wide}, naive_recurrent_gla(**first, gk=wide, **ends)),
        "delta_rule": ({"beta": beta}, (turned(o), last)),
        "gated_delta_rule": ({"g": g, "beta": beta}, naive_recurrent_gated_delta_rule(**first, beta=beta, g=g, **ends)),
        "kda": ({"g": wide, "beta": beta}, naive_recurrent_kda(**first, g=wide, beta=beta, **ends)),
    }
    for name, (more, right) in loops.items():
        _assert_close(getattr(ops, f"chunk_{name}")(**first, **more, **ends), right)
        more = {"gk": wide} if name == "gla" else more
        _assert_close(getattr(ops, f"fused_recurrent_{name}")(**first, **more, **ends), right)
    right = turned(naive_retention(*map(turned, (q, k, v))))
    positive, ends = (q.exp(), k.exp(), v), (state, q[:, :1].exp())
    o, states = naive_recurrent_linear_attn(*positive, None, ends, True, normalize=True)
    for form in ("chunk", "fused_chunk", "fused_recurrent"):
        linear = getattr(ops, f"{form}_linear_attn")
        found, last = linear(*positive, initial_state=ends, output_final_state=True, normalize=True)
        _assert_close((found, *last), (o, *states))
    x, state = wide[..., 0], torch.randn(B, H, generator=draw)
    for form in ("chunk", "fused_recurrent"):
        _assert_close(getattr(ops, f"{form}_retention")(q, k, v)[:1], (right,))
        _assert_close(getattr(ops, f"{form}_hgrn")(x, g, state, True), naive_recurrent_hgrn(x, g, state, True))
