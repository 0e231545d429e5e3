"""mlstm_kernels.torch.parallel.triton_limit_headdim."""

from .native import mlstm_parallel__native_custbw

mlstm_parallel__limit_headdim = mlstm_parallel__native_custbw
