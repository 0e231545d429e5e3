"""The heads of a delta rule's mixers: how many, how wide, and of what their sizes follow."""

from .check import check_divides, check_positive, head_width
from .step import Mixer


class DeltaMixer(Mixer):
    """A mixer with heads of keys, which heads of values share."""

    d_model: int
    num_heads: int
    num_v_heads: int
    key_dim: int
    value_dim: int

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
