"""mlstm_kernels.torch.chunkwise: mLSTM of whole sequences from states and to states, by one op."""

from .native import mlstm_chunkwise__native_autograd, mlstm_chunkwise__native_custbw
from .triton_limit_chunk import mlstm_chunkwise__limit_chunk
from .triton_xl_chunk import mlstm_chunkwise__xl_chunk
from .triton_xl_chunk_siging import mlstm_siging_chunkwise__xl_chunk

__all__ = [
    "mlstm_chunkwise__limit_chunk",
    "mlstm_chunkwise__native_autograd",
    "mlstm_chunkwise__native_custbw",
    "mlstm_chunkwise__xl_chunk",
    "mlstm_siging_chunkwise__xl_chunk",
]

registry = {
    "native_autograd": mlstm_chunkwise__native_autograd,
    "native_custbw": mlstm_chunkwise__native_custbw,
    "triton_limit_chunk": mlstm_chunkwise__limit_chunk,
    "triton_xl_chunk": mlstm_chunkwise__xl_chunk,
    "triton_xl_chunk_siging": mlstm_siging_chunkwise__xl_chunk,
}
