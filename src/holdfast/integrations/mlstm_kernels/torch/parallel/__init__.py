"""mlstm_kernels.torch.parallel: mLSTM of whole sequences without states, by the same op as the chunkwise ones."""

from .native import mlstm_parallel__native_autograd, mlstm_parallel__native_custbw
from .native_siging import mlstm_siging_parallel__native_autograd, mlstm_siging_parallel__native_custbw
from .native_stablef import mlstm_parallel__native_stablef_autograd, mlstm_parallel__native_stablef_custbw
from .triton_limit_headdim import mlstm_parallel__limit_headdim

__all__ = [
    "mlstm_parallel__limit_headdim",
    "mlstm_parallel__native_autograd",
    "mlstm_parallel__native_custbw",
    "mlstm_parallel__native_stablef_autograd",
    "mlstm_parallel__native_stablef_custbw",
    "mlstm_siging_parallel__native_autograd",
    "mlstm_siging_parallel__native_custbw",
]

registry = {
    "native_autograd": mlstm_parallel__native_autograd,
    "native_custbw": mlstm_parallel__native_custbw,
    "native_stablef_autograd": mlstm_parallel__native_stablef_autograd,
    "native_stablef_custbw": mlstm_parallel__native_stablef_custbw,
    "triton_limit_headdim": mlstm_parallel__limit_headdim,
    "native_siging_autograd": mlstm_siging_parallel__native_autograd,
    "native_siging_custbw": mlstm_siging_parallel__native_custbw,
}
