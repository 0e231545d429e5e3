"""Roundings whose parts add up, and values that the compiler cannot see through."""

from .compat import gl, gluon


@gluon.jit
def round_to(x, dtype: gl.constexpr):
    """Return x rounded to dtype, in float32. By pairs: one number's conversion takes as long as eight instructions."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 both, low, high;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 low, both, 16;
            and.b32 high, both, 0xffff0000;
            mov.b32 $0, low;
            mov.b32 $1, high;
            }""",
            "=f,=f,f,f",
            [x],
            gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(dtype).to(gl.float32)


@gluon.jit
def opaque(x):
    """Return x as a value that the compiler cannot see through.

    What depends on it is computed again, and takes no registers from one iteration of a loop to the next.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1)
