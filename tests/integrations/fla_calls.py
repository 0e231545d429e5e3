"""Calls of flash-linear-attention's ops on a CPU, which fla's own kernels do not serve: run by Holdfast, or refused.

`python -m integrations.fla_calls` with fla on the path prints, as JSON, what went wrong in each of CALLS, or null.
"""

import inspect
import json
import logging
import traceback

import pytest
import torch
import torch.nn.functional as F

from integrations.fla_ops_calls import ops_by_name_are_flas_step_loops, ops_by_name_have_flas_signatures

B, T, H, HV, K, V = 2, 70, 2, 4, 16, 8


def example(vector=False, batch=B, length=T):
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=draw)

    q, k = (F.normalize(normal(batch, length, H, K), dim=-1) for _ in range(2))
    g = F.logsigmoid(normal(batch, length, HV, K) if vector else normal(batch, length, HV))
    given = {"q": q, "k": k, "v": normal(batch, length, HV, V), "g": g, "beta": normal(batch, length, HV).sigmoid()}
    return {name: x.requires_grad_() for name, x in given.items()}


def results(run, given, **more):
    """o, the final state and all gradients."""
    o, state = run(**given, **more)
    used = [x for x in (*given.values(), *more.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    loss = o.float().sin().sum() + (0 if state is None else state.sin().sum())
    return [o, state, *torch.autograd.grad(loss, used)]


def assert_close(found, right):
    assert len(found) == len(right)
    for got, wanted in zip(found, right, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-5)


def the_gated_delta_rule_is_flas():
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    def naive(q, k, v, g, beta, initial_state):
        q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
        return naive_recurrent_gated_delta_rule(q, k, v, beta, g, initial_state=initial_state, output_final_state=True)

    given, state = example(), torch.randn(B, HV, K, V).requires_grad_()
    found = results(chunk_gated_delta_rule, given, initial_state=state, output_final_state=True)
    assert_close(found, results(naive, given, initial_state=state))
    assert results(chunk_gated_delta_rule, given)[1] is None


def kda_is_flas():
    from fla.ops.kda import chunk_kda
    from fla.ops.kda.naive import naive_recurrent_kda

    given, state = example(vector=True), torch.randn(B, HV, K, V).requires_grad_()
    found = results(chunk_kda, given, initial_state=state, output_final_state=True)
    assert_close(found, results(naive_recurrent_kda, given, initial_state=state, output_final_state=True))


def gates_norms_and_states_turned_round():
    """The options of a layer, against the same by PyTorch in front of the op."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda
    from fla.ops.kda.gate import naive_kda_gate

    A_log, wide = torch.randn(HV), torch.randn(HV * K)
    options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    for vector, op, bias in ((False, chunk_gated_delta_rule, wide[:HV]), (True, chunk_kda, wide)):
        given, state = example(vector), torch.randn(B, HV, V, K)
        given["q"] = (3 * given["q"]).detach().requires_grad_()
        raw = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": bias, "output_final_state": True}
        found = results(op, given, initial_state=state, state_v_first=True, **options, **raw)

        def plain(q, k, v, g, beta, op=op, bias=bias, vector=vector, state=state):
            g = naive_kda_gate(g, A_log, bias) if vector else -A_log.exp() * F.softplus(g + bias)
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
            o, last = op(q, k, v, g, 2 * beta.sigmoid(), initial_state=state.mT, output_final_state=True)
            return o, last.mT

        assert_close(found, results(plain, given))
        assert found[1].is_contiguous()


def a_bounded_gate():
    from fla.ops.kda import chunk_kda
    from fla.ops.kda.gate import naive_kda_lowerbound_gate

    given, A_log, bias = example(vector=True), torch.randn(HV), torch.randn(HV * K)
    raw = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": bias, "safe_gate": True, "lower_bound": -5.0}

    def plain(q, k, v, g, beta):
        return chunk_kda(q, k, v, naive_kda_lowerbound_gate(g, A_log, bias, lower_bound=-5.0), beta)

    assert_close(results(chunk_kda, given, **raw), results(plain, given))


def packed_sequences():
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    offsets = torch.tensor([0, 9, 9, T])
    for vector, op in ((False, chunk_gated_delta_rule), (True, chunk_kda)):
        given = example(vector, batch=1)
        found, states = op(**given, cu_seqlens=offsets, cu_seqlens_cpu=offsets, output_final_state=True)
        assert states.shape == (3, HV, K, V)
        for n, (a, b) in enumerate(((0, 9), (9, 9), (9, T))):
            alone, state = op(**{name: x[:, a:b] for name, x in given.items()}, output_final_state=True)
            torch.testing.assert_close(found[:, a:b], alone)
            torch.testing.assert_close(states[n : n + 1], state)


def every_argument_of_flas_is_served_or_refused():
    """By name and place, so that a call by position means the same; what Holdfast refuses says why."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    from holdfast.integrations.fla import arguments as ours

    refused = {"cp_context": object(), "use_graph": True, "return_intermediate_states": True, "head_first": True}
    for op, arguments in ((chunk_gated_delta_rule, ours.gated_delta_rule_arguments), (chunk_kda, ours.kda_arguments)):
        theirs = [name for name in inspect.signature(op).parameters if name != "kwargs"]
        parameters = inspect.signature(arguments).parameters.values()
        assert theirs == [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]
        given = example(op is chunk_kda)
        for name in {*theirs, "head_first"} & refused.keys():
            with pytest.raises((ValueError, TypeError), match=name):
                arguments(**given, **{name: refused[name]})


def what_is_refused_goes_on_to_fla():
    """And is logged, with the reason."""
    from fla.ops.kda import chunk_kda

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("fla.backends")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    # fla's own error
    with pytest.raises(ValueError, match="`allow_neg_eigval=True` requires"):
        chunk_kda(**example(vector=True), allow_neg_eigval=True)
    assert any("holdfast rejected: allow_neg_eigval: expected" in each for each in said), said


def fla_runs_itself_once_disabled():
    from fla.ops.kda import chunk_kda

    from holdfast.integrations import fla as ours

    ours.disable()
    # Triton has no device here
    with pytest.raises(Exception):  # noqa: B017, PT011
        chunk_kda(**example(vector=True))
    ours.enable()
    chunk_kda(**example(vector=True))


CALLS = (
    the_gated_delta_rule_is_flas, kda_is_flas, gates_norms_and_states_turned_round, a_bounded_gate, packed_sequences,
    every_argument_of_flas_is_served_or_refused, what_is_refused_goes_on_to_fla, fla_runs_itself_once_disabled,
    ops_by_name_have_flas_signatures, ops_by_name_are_flas_step_loops,
)  # fmt: skip


def main() -> None:
    from holdfast.integrations import fla

    fla.enable()
    fla.enable()
    said = {}
    for call in CALLS:
        torch.manual_seed(0)
        try:
            call()
            said[call.__name__] = None
        except Exception:
            said[call.__name__] = traceback.format_exc()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
