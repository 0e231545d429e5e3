"""Linear attention: no decay."""

from .definition import Recurrence
from .simple_gla import QKV, STATE, draw_qkv, map_call

LINEAR_ATTENTION = Recurrence(
    name="linear_attention",
    family="matrix",
    title="Linear attention (without feature map and normaliser)",
    equation="S_t = S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t",
    paper="Katharopoulos et al. 2020, Transformers are RNNs (arXiv:2006.16236)",
    arguments=QKV | STATE,
    map=map_call,
    example=draw_qkv,
)
