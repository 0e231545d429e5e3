"""What kind of work a kernel does, by its name."""

import ast
import re
from functools import cache
from pathlib import Path

import holdfast.kernels

KINDS = (
    "projection", "convolution", "op", "attention", "norm", "element-wise", "copies", "loss", "optimiser", "other"
)  # fmt: skip

# Of PyTorch, its libraries and compiler, and of other packages; the first that is found counts.
_BY_NAME = (
    ("optimiser", r"multi_tensor_apply|adam"),
    ("attention", r"flash|fmha|sdpa|attention|cudnn::fusion"),
    # the compiler's own name their operations
    ("norm", r"norm|rsqrt"),
    ("convolution", r"conv(?!ert)"),
    ("loss", r"softmax|nll_loss|embedding|cross_entropy|RadixSort|indexing_backward|krn_partial"),
    ("projection", r"gemm|gemv|cutlass|nvjet|xmma|cublas|splitKreduce|triton_tem_|triton_mm|matmul"),
    # the compiler's own, by what they are made of: only what lays out or casts is a copy
    (
        "copies",
        r"^triton_poi_fused(_(_to_copy|clone|cat|t|transpose|permute|view|_unsafe_view|copy|expand|slice))+_\d+$",
    ),
    ("element-wise", r"^triton_(poi|per|red)_"),
    ("op", r"LSTM|RNN|persist|chunk_|fused_recurrent|_fwd_kernel|_bwd_kernel|fwd_h|recompute_w_u|cumsum_"),
    ("copies", r"copy|Cat[A-Z]|[Mm]emcpy|[Mm]emset|FillFunctor|transpose"),
    ("element-wise", r"elementwise|reduce|sum|scan|index|gather|scatter|where|arange"),
)


@cache
def own_kernels() -> dict[str, str]:
    """Names of Holdfast's kernels -> kind, from their sources: jit functions and CUDA's entries."""
    found: dict[str, str] = {}
    root = Path(next(iter(holdfast.kernels.__path__)))
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root).parts
        kind = "convolution" if place[0] == "conv" else "norm" if "norm" in path.stem.split("_") else "op"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list):
                found[node.name] = kind
    for path in sorted(root.rglob("*.cu")):
        found |= dict.fromkeys(re.findall(r"__global__[^\n]*\n(\w+)\(", path.read_text(encoding="utf-8")), "op")
    # printed for a cell when it is first called
    return found | {"dense_cell_step_forward": "op", "dense_cell_step_backward": "op"}


def kind_of(kernel: str) -> str:
    """One of KINDS."""
    if known := own_kernels().get(kernel):
        return known
    # a compiled region that holds a norm among other things is counted with it
    return next((kind for kind, pattern in _BY_NAME if re.search(pattern, kernel)), "other")
