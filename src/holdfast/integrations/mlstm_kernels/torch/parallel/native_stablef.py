"""mlstm_kernels.torch.parallel.native_stablef: the same, as sums of forget gates are over windows here anyway."""

from .native import mlstm_parallel__native_autograd, mlstm_parallel__native_custbw

mlstm_parallel__native_stablef_autograd = mlstm_parallel__native_autograd
mlstm_parallel__native_stablef_custbw = mlstm_parallel__native_custbw
