"""mlstm_kernels.torch.backend_module: the module by which xLSTM models call mLSTM."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..call import sequence
from . import get_mlstm_kernel, get_mlstm_sequence_kernel, get_mlstm_step_kernel

__all__ = ["mLSTMBackend", "mLSTMBackendConfig"]

_MODES = ("train", "train_with_padding", "inference")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class mLSTMBackendConfig:
    """What `mLSTMBackend` is told, with mlstm_kernels' names and defaults; docs/integrations.md tells of each.

    Raises:
        ValueError: for return_last_states=True with a parallel kernel or with mode "train_with_padding", for an unknown
            mode or dtype.
    """

    chunkwise_kernel: str = "chunkwise--native_autograd"
    sequence_kernel: str = "native_sequence__native"
    step_kernel: str = "native"
    mode: str = "train"
    chunk_size: int = 64
    return_last_states: bool = True
    autocast_kernel_dtype: str = "bfloat16"
    eps: float = 1e-6
    inference_state_dtype: str = "float32"
    normalize_siging: bool = True

    def __post_init__(self) -> None:
        _check_mode(self.mode)
        for name in ("autocast_kernel_dtype", "inference_state_dtype"):
            if getattr(self, name) not in _DTYPES:
                raise ValueError(f"{name}: expected one of {', '.join(_DTYPES)}; got {getattr(self, name)!r}")
        for refuses in ("parallel" in self.chunkwise_kernel, self.mode == "train_with_padding"):
            if refuses and self.return_last_states:
                raise ValueError("return_last_states: expected False with a parallel kernel and with "
                                 "mode='train_with_padding'; got True")  # fmt: skip


class mLSTMBackend(nn.Module):
    """`holdfast.mlstm`, and for one token of inference `holdfast.step`.

    config: an `mLSTMBackendConfig`; which kernels it names says whether the input gate is a sigmoid, no more.

    Raises:
        ValueError: for a kernel that is not known.
    """

    config_class = mLSTMBackendConfig

    def __init__(self, config: mLSTMBackendConfig) -> None:
        super().__init__()
        self.config = config
        self.chunkwise_kernel_fn = get_mlstm_kernel(config.chunkwise_kernel)
        self.sequence_kernel_fn = get_mlstm_sequence_kernel(config.sequence_kernel)
        self.step_kernel_fn = get_mlstm_step_kernel(config.step_kernel)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        i: Tensor,
        f: Tensor,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        return_last_states: bool | None = None,
        mode: str | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
        """q, k [B, H, T, K], v [B, H, T, V], i, f [B, H, T] and states as the kernels take them, of any T.

        Args:
            return_last_states, mode: by default the config's. Inference always returns states.

        Returns:
            h [B, H, T, V], or (h, (c, n, m)), in inference with states of the config's inference_state_dtype; with a
            sigmoid input gate (h, (c, n)).

        Raises:
            ValueError: for inference with a sigmoid input gate, whose step mlstm_kernels has not; for what the config
                refuses; and as `holdfast.mlstm` does.
        """
        states = {"c_initial": c_initial, "n_initial": n_initial, "m_initial": m_initial}
        mode = self.config.mode if mode is None else mode
        _check_mode(mode)
        if mode == "inference":
            return self._infer((q, k, v, i, f), states)
        if return_last_states is None:
            return_last_states = self.config.return_last_states
        if return_last_states and "train_with_padding" in (mode, self.config.mode):
            raise ValueError("return_last_states: expected False with mode='train_with_padding'; got True")
        return self.chunkwise_kernel_fn(
            q, k, v, i, f, **states, return_last_states=return_last_states, eps=self.config.eps, **self._options()
        )

    def extra_repr(self) -> str:
        return f"{self.config}"

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"chunk_size": self.config.chunk_size}
        options["autocast_kernel_dtype"] = _DTYPES[self.config.autocast_kernel_dtype]
        if "siging" in self.config.chunkwise_kernel:
            options["normalize"] = self.config.normalize_siging
        return options

    def _infer(self, inputs: tuple[Tensor, ...], states: dict[str, Tensor | None]) -> tuple[Tensor, tuple[Tensor, ...]]:
        kernel, eps = self.config.chunkwise_kernel, self.config.eps
        if "siging" in kernel:
            raise ValueError(f"mode: expected training with chunkwise_kernel={kernel!r}, as steps have an exponential "
                             "input gate; got 'inference'")  # fmt: skip
        dtype = _DTYPES[self.config.inference_state_dtype]
        if inputs[0].shape[2] == 1 and all(x is not None for x in states.values()):
            tokens = [x.squeeze(2) for x in inputs[:3]]
            h, after = self.step_kernel_fn(*tokens, *inputs[3:], *states.values(), eps=eps, dtype_state=dtype)
            return h[:, :, None], after
        given = dict(zip(("q", "k", "v", "i", "f"), inputs, strict=True)) | states
        h, last = sequence(given, True, eps, _DTYPES[self.config.autocast_kernel_dtype])
        return h, tuple(x.to(dtype) for x in last)


def _check_mode(mode: str) -> None:
    if mode not in _MODES:
        raise ValueError(f"mode: expected one of {', '.join(map(repr, _MODES))}; got {mode!r}")
