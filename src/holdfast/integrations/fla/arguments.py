"""What Holdfast's ops are given for calls of flash-linear-attention's `chunk_gated_delta_rule` and `chunk_kda`."""

from torch import Tensor

from .call import Arguments, carried, refuse


def gated_delta_rule_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    head_first: bool = False,
) -> tuple[Arguments, bool]:
    """What `holdfast.gated_delta_rule` is given for a call of fla's `chunk_gated_delta_rule`, and whether states are
    [N, HV, V, K].

    cu_seqlens_cpu, chunk_indices and chunk_size say how fla's kernels go about it; head_first is of its older versions.
    Raises ValueError for what Holdfast does not serve.
    """
    refuse(cp_context=cp_context, head_first=head_first)
    if use_gate_in_kernel and A_log is None:
        raise ValueError("A_log: expected a tensor beside use_gate_in_kernel=True; got None")
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": scale}
    given |= carried(q, initial_state, output_final_state, cu_seqlens, state_v_first)
    given |= options(use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return given | ({"A_log": A_log, "dt_bias": dt_bias} if use_gate_in_kernel else {}), state_v_first


def kda_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    head_first: bool = False,
) -> tuple[Arguments, bool]:
    """The same for `holdfast.kda` and fla's `chunk_kda`; disable_recompute, too, says how fla's kernels go about it."""
    refuse(cp_context=cp_context, use_graph=use_graph, return_intermediate_states=return_intermediate_states)
    refuse(head_first=head_first)
    if use_gate_in_kernel and A_log is None and lower_bound is None:
        raise ValueError("A_log: expected a tensor beside use_gate_in_kernel=True without lower_bound; got None")
    if safe_gate and use_gate_in_kernel and (lower_bound is None or not -5 <= lower_bound < 0):
        raise ValueError(f"lower_bound: expected a number from -5 to below 0 beside safe_gate=True; got {lower_bound}")
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": scale}
    given |= carried(q, initial_state, output_final_state, cu_seqlens, state_v_first)
    given |= options(use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if use_gate_in_kernel:
        # fla has it as one axis
        bias = None if dt_bias is None else dt_bias.view(g.shape[2:])
        given |= {"A_log": A_log, "dt_bias": bias, "lower_bound": lower_bound}
    return given, state_v_first


def options(l2norm: bool, beta_sigmoid: bool, allow_neg_eigval: bool) -> Arguments:
    """Of the delta rules' inputs, by Holdfast's names. Raises ValueError for allow_neg_eigval without beta_sigmoid."""
    if allow_neg_eigval and not beta_sigmoid:
        raise ValueError("allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True beside it; got False")
    return {"qk_l2norm": l2norm, "beta_sigmoid": beta_sigmoid, "allow_neg_eigval": allow_neg_eigval}
