"""Functions in another library's place have its signatures, and docs/integrations.md tells of every argument."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()

# as the library has them, defaults included
SIGNATURES = {
    "causal_conv1d": {
        "causal_conv1d_fn": "x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, "
        "final_states_out=None, activation=None",
        "causal_conv1d_update": "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, "
        "conv_state_indices=None",
    },
    "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": "x, cu_seqlens, state_len"},
    "mamba_ssm": {
        "mamba_inner_fn": "xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, "
        "out_proj_bias, A, B=None, C=None, D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, "
        "delta_softplus=True, checkpoint_lvl=1, b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None, "
        "b_c_dt_rms_eps=1e-06",
        "rmsnorm_fn": "x, weight, bias, z=None, eps=1e-06, group_size=None, norm_before_gate=True",
        "mamba_split_conv1d_scan_combined": "zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, "
        "initial_states=None, seq_idx=None, dt_limit=(0.0, inf), return_final_states=False, activation='silu', "
        "rmsnorm_weight=None, rmsnorm_eps=1e-06, outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, "
        "norm_before_gate=True, state_dtype=None",
        "RMSNormGated": "hidden_size, eps=1e-05, group_size=None, norm_before_gate=True, device=None, dtype=None",
        "mamba_chunk_scan_combined": "x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, "
        "seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, inf), return_final_states=False, "
        "return_varlen_states=False, state_dtype=None",
        "selective_scan_fn": "u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, "
        "return_last_state=False",
        "selective_state_update": "state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, "
        "state_batch_indices=None",
    },
    "flashrnn": {
        "flashrnn": "Wx, R, b, states=None, function='lstm', config=None, backend='cuda_fused', dtype='bfloat16'",
        # without its fields of one underscore, which it makes itself
        "FlashRNNConfig": "backend='cuda_fused', function='lstm', gradient_recurrent_cut=False, "
        "gradient_recurrent_clipval=None, forward_clipval=None, constants=None, simple_agg=True, hidden_dim=-1, "
        "num_heads=-1, head_dim=-1, num_states=4, num_gates_r=4, num_gates_w=4, num_gates_i=4, num_gates_t=4, "
        "batch_size=8, input_shape='BTGHD', output_shape='SBTHD', recurrent_shape='GHDP', bias_shape='GHD', "
        "dtype='bfloat16', dtype_acc='float32', dtype_b=None, dtype_r=None, dtype_w=None, dtype_g=None, dtype_s=None, "
        "dtype_a=None, enable_automatic_mixed_precision=True, trainable_r=True, trainable_b=True, initial_val=0.0",
    },
}
_MLSTM = "q, k, v, i, f, c_initial=None, n_initial=None, m_initial=None, return_last_states=False, eps=1e-06"
_XL = (
    "chunk_size=128, chunk_size_inter=None, chunk_size_intra=None, siz_b_L_parallel=None, siz_b_L_loop=None, "
    "siz_b_DH_parallel=None, siz_b_DH_loop=None, num_warps_intra=None, num_warps_inter=None, num_stages_intra=None, "
    "num_stages_inter=None, recompute_states_in_bw=True, autocast_kernel_dtype=torch.float32"
)
_STEP = "q, k, v, i, f, c, n, m, eps=1e-06, dtype_state=torch.float32"
_CAST = "autocast_kernel_dtype=torch.float32"
_AUTOGRAD = f"{_MLSTM}, *, {_CAST}, chunk_size=None"
_CUSTBW = f"{_MLSTM}, {_CAST}, *, chunk_size=None"
_SIGMOID = f"{_MLSTM}, stable_fgate=True, normalize=True"
# what mlstm_kernels takes by any keyword is keyword-only here
SIGNATURES |= {
    "mlstm_kernels.torch": {
        "get_available_mlstm_kernels": "",
        "get_available_mlstm_sequence_kernels": "",
        "get_available_mlstm_step_kernels": "",
        "get_mlstm_kernel": "name",
        "get_mlstm_sequence_kernel": "name",
        "get_mlstm_step_kernel": "name",
    },
    "mlstm_kernels.torch.backend_module": {
        "mLSTMBackend": "config",
        "mLSTMBackendConfig": "chunkwise_kernel='chunkwise--native_autograd', "
        "sequence_kernel='native_sequence__native', step_kernel='native', mode='train', chunk_size=64, "
        "return_last_states=True, autocast_kernel_dtype='bfloat16', eps=1e-06, inference_state_dtype='float32', "
        "normalize_siging=True",
    },
    "mlstm_kernels.torch.chunkwise": {
        "mlstm_chunkwise__limit_chunk": f"{_MLSTM}, chunk_size=64, {_CAST}",
        "mlstm_chunkwise__native_autograd": f"{_MLSTM}, chunk_size=64, *, {_CAST}",
        "mlstm_chunkwise__native_custbw": f"{_MLSTM}, chunk_size=64, {_CAST}",
        "mlstm_chunkwise__xl_chunk": f"{_MLSTM}, {_XL}",
        "mlstm_siging_chunkwise__xl_chunk": f"{_MLSTM}, normalize=True, {_XL}",
    },
    "mlstm_kernels.torch.parallel": {
        "mlstm_parallel__limit_headdim": _CUSTBW,
        "mlstm_parallel__native_autograd": _AUTOGRAD,
        "mlstm_parallel__native_custbw": _CUSTBW,
        "mlstm_parallel__native_stablef_autograd": _AUTOGRAD,
        "mlstm_parallel__native_stablef_custbw": _CUSTBW,
        "mlstm_siging_parallel__native_autograd": f"{_SIGMOID}, *, {_CAST}, chunk_size=None",
        "mlstm_siging_parallel__native_custbw": f"{_SIGMOID}, {_CAST}, *, chunk_size=None",
    },
    "mlstm_kernels.torch.recurrent": {
        "mlstm_recurrent_sequence__native_fw": f"{_MLSTM}, dtype_state=torch.float32",
        "mlstm_recurrent_sequence__triton_step_fused_fw": f"{_MLSTM}, dtype_state=torch.float32",
        "mlstm_recurrent_step__native": _STEP,
        "mlstm_recurrent_step__triton": _STEP,
    },
}
_SHARED = "scale=None, initial_state=None, output_final_state=False"
_TURNED = "state_v_first=False, cu_seqlens=None"
_DELTA = f"{_SHARED}, use_qk_l2norm_in_kernel=False"
_OLD = "head_first=False"
_RAW = "A_log=None, dt_bias=None"
# what fla takes by any keyword is keyword-only here
SIGNATURES["fla.ops"] = {
    "chunk_simple_gla": f"q, k, v, g=None, g_gamma=None, {_SHARED}, {_TURNED}, cu_seqlens_cpu=None, *, "
    f"chunk_size=None, {_OLD}",
    "fused_recurrent_simple_gla": f"q, k, v, g=None, g_gamma=None, {_SHARED}, reverse=False, {_TURNED}, *, {_OLD}",
    "chunk_gla": f"q, k, v, g, {_SHARED}, {_TURNED}, cu_seqlens_cpu=None, *, {_OLD}",
    "fused_recurrent_gla": f"q, k, v, gk=None, gv=None, {_SHARED}, reverse=False, {_TURNED}, *, {_OLD}",
    "chunk_delta_rule": f"q, k, v, beta, {_DELTA}, cu_seqlens=None, cu_seqlens_cpu=None, *, chunk_size=64, {_OLD}",
    "fused_recurrent_delta_rule": f"q, k, v, beta=None, {_DELTA}, cu_seqlens=None, *, {_OLD}",
    "chunk_gated_delta_rule": f"q, k, v, g, beta, {_DELTA}, use_beta_sigmoid_in_kernel=False, "
    f"allow_neg_eigval=False, {_TURNED}, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, *, "
    f"use_gate_in_kernel=False, {_RAW}, chunk_size=64, {_OLD}",
    "fused_recurrent_gated_delta_rule": f"q, k, v, g=None, gk=None, gv=None, beta=None, {_DELTA}, "
    f"use_gate_in_kernel=False, {_RAW}, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, {_TURNED}, *, "
    f"{_OLD}",
    "chunk_kda": f"q, k, v, g, beta, {_DELTA}, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, "
    "allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False, "
    f"return_intermediate_states=False, {_TURNED}, cu_seqlens_cpu=None, cp_context=None, use_graph=False, "
    f"max_num_seqs=None, *, {_RAW}, chunk_size=64, {_OLD}",
    "fused_recurrent_kda": f"q, k, v, g, beta, {_RAW}, {_DELTA}, use_gate_in_kernel=False, "
    f"use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, {_TURNED}, *, {_OLD}",
    "chunk_retention": f"q, k, v, {_SHARED}, cu_seqlens=None, *, chunk_size=None, {_OLD}",
    "fused_recurrent_retention": f"q, k, v, {_SHARED}, reverse=False, {_TURNED}, *, {_OLD}",
    "chunk_lightning_attn": f"q, k, v, layer_idx, num_layers, {_SHARED}, cu_seqlens=None, *, chunk_size=None, {_OLD}",
    "fused_recurrent_lightning_attn": f"q, k, v, layer_idx, num_layers, {_SHARED}, reverse=False, cu_seqlens=None, "
    f"*, {_OLD}",
    "fused_chunk_simple_gla": f"q, k, v, g=None, g_gamma=None, {_SHARED}, cu_seqlens=None, *, {_OLD}",
    "parallel_simple_gla": f"q, k, v, g=None, scale=None, output_attentions=False, cu_seqlens=None, "
    f"cu_seqlens_cpu=None, *, {_OLD}",
    "fused_chunk_gla": f"*, q, k, v, g, {_SHARED}, {_OLD}",
    "fused_chunk_delta_rule": f"*, q, k, v, beta, {_SHARED}, {_OLD}",
    "fused_chunk_retention": f"q, k, v, {_SHARED}, cu_seqlens=None, *, {_OLD}",
    "parallel_retention": f"q, k, v, scale=None, output_attentions=False, cu_seqlens=None, *, {_OLD}",
    "chunk_linear_attn": f"q, k, v, {_SHARED}, normalize=True, cu_seqlens=None, *, {_OLD}",
    "fused_chunk_linear_attn": f"q, k, v, {_SHARED}, normalize=True, cu_seqlens=None, *, {_OLD}",
    "fused_recurrent_linear_attn": f"q, k, v, {_SHARED}, reverse=False, normalize=False, cu_seqlens=None, *, {_OLD}",
    "chunk_hgrn": "x, g, initial_state=None, output_final_state=False",
    "fused_recurrent_hgrn": "x, g, initial_state=None, output_final_state=False, cu_seqlens=None",
}
for _form in ("chunk", "fused_recurrent"):
    SIGNATURES["fla.ops"][f"{_form}_gdn"] = SIGNATURES["fla.ops"][f"{_form}_gated_delta_rule"]
FUNCTIONS = [(module, name) for module, functions in SIGNATURES.items() for name in functions]


def signature(module, name):
    return inspect.signature(getattr(import_module(f"holdfast.integrations.{module}"), name))


def sections():
    """Names in a heading of third rank -> the arguments in the first column of the table below it."""
    found = {}
    for part in re.split(r"\n##+ ", PAGE):
        heading, _, text = part.partition("\n")
        rows = re.findall(r"^\| (.*?) \|", text, re.M)
        arguments = {argument for row in rows for argument in re.findall(r"`(\w+)`", row)}
        found |= {tuple(re.findall(r"`(\w+)`", heading)): arguments}
    return found


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_signature(module, name):
    found = signature(module, name)
    parameters = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    assert str(found.replace(parameters=parameters, return_annotation=found.empty)) == f"({SIGNATURES[module][name]})"


def test_functions_that_are_made_say_what_they_return():
    found = signature("fla.ops", "chunk_kda").return_annotation
    assert found == signature("fla.ops", "fused_recurrent_kda").return_annotation


@pytest.mark.parametrize("module", SIGNATURES)
def test_nothing_else_is_public(module):
    assert set(import_module(f"holdfast.integrations.{module}").__all__) == SIGNATURES[module].keys()


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_the_page_tells_of_every_argument(module, name):
    names, told = next((names, told) for names, told in sections().items() if name in names)
    assert signature(module, name).parameters.keys() <= told
    taken = {argument for each in names for argument in signature(module, each).parameters}
    assert told <= taken
