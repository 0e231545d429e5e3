"""The heads of a delta rule's mixers: how many, how wide, and of what their sizes follow."""

from torch import Tensor

from .check import check_divides, check_input, check_positive, check_state, head_width, wide
from .short_convolution import ShortConvolution
from .step import Mixer


class DeltaMixer(Mixer):
    """A mixer with heads of keys, which heads of values share."""

    d_model: int
    num_heads: int
    num_v_heads: int
    key_dim: int
    value_dim: int
    conv: ShortConvolution

    def set_heads(
        self, d_model: int, num_heads: int, head_dim: int | None, num_v_heads: int | None, expand_v: float
    ) -> tuple[int, int]:
        """Sets the sizes, from the arguments of that name; returns the channels of all keys and of all values.

        Raises ValueError, which names it, for a size that is not positive or does not divide.
        """
        self.d_model = check_positive("d_model", d_model)
        self.num_heads = check_positive("num_heads", num_heads)
        if head_dim is None:
            head_dim = check_divides("num_heads", num_heads, "d_model", d_model)
        self.key_dim = check_positive("head_dim", head_dim)
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        check_divides("num_heads", num_heads, "num_v_heads", self.num_v_heads)
        self.value_dim = head_width("expand_v", expand_v, "head_dim", head_dim, 1)
        return num_heads * self.key_dim, self.num_v_heads * self.value_dim

    def checked_state(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The state's S [N, num_v_heads, K, V] and tail [N, conv_width - 1, D], or None each.

        Both are float32, float64 beside x in float64. Raises ValueError or TypeError for x [B, T, d_model], a state
        or cu_seqlens of the wrong shape or dtype.
        """
        sequences, dtype = check_input(x, self.d_model, cu_seqlens), wide(x.dtype)
        shape = (sequences, self.num_v_heads, self.key_dim, self.value_dim)
        tail_shape = (sequences, self.conv.width - 1, self.conv.channels)
        S, tail = check_state(state, [("S", shape, dtype), ("tail", tail_shape, dtype)])
        return S, tail
