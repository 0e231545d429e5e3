"""mlstm_kernels.torch.recurrent.triton_step."""

from .native_step import mlstm_recurrent_step__native

mlstm_recurrent_step__triton = mlstm_recurrent_step__native
