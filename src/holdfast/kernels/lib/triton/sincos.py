"""Cosine and sine in float32, for Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def reduced_cos_sin(r, quadrant):
    """Return cos and sin of quadrant * pi/2 + r to about 1e-7, for r within pi/4 of 0 and an int32 quadrant.

    By the polynomials of Cephes' sinf and cosf.
    """
    square = r * r
    s = (-1.9515295891e-4 * square + 8.3321608736e-3) * square - 1.6666654611e-1
    s = s * square * r + r
    c = (2.443315711809948e-5 * square - 1.388731625493765e-3) * square + 4.166664568298827e-2
    c = c * square * square - 0.5 * square + 1.0
    odd = (quadrant & 1) == 1
    cosine, sine = tl.where(odd, s, c), tl.where(odd, c, s)
    return tl.where((quadrant + 1) & 2 != 0, -cosine, cosine), tl.where(quadrant & 2 != 0, -sine, sine)
