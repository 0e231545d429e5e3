"""mlstm_kernels.torch.chunkwise.triton_limit_chunk."""

from .native import mlstm_chunkwise__native_custbw

mlstm_chunkwise__limit_chunk = mlstm_chunkwise__native_custbw
