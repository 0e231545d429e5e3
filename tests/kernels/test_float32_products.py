"""Triton's products in float32 take three TF32 ones: one alone, which is the default, keeps half of the digits."""

import ast

import pytest

from sanitize.sources import KERNELS

# file and first operand of products that only ever have 16-bit operands
OF_16_BITS = {
    ("dense/triton/time_loop.py", "operand"),
    ("dense/weight_grad/triton.py", "tl.trans(left)"),
    ("chunk/inter/triton/states.py", "first"),
    ("chunk/inter/triton/states.py", "second"),
    ("chunk/inter/triton/states.py", "third"),
    ("matrix/delta_rule/triton/segment_dstates.py", "tl.trans(w)"),
    ("matrix/delta_rule/triton/chunk_inverse.py", "rounded"),
}


def unsaid(text: str) -> list[str]:
    """First operands of the products of a source that say nothing of their precision, or less than tf32x3."""
    calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "tl.dot"]
    found = []
    for call in calls:
        said = [ast.unparse(k.value) for k in call.keywords if k.arg == "input_precision"]
        if said not in (["PRECISION"], ["constants.PRECISION"], ["'tf32x3'"], ["'ieee'"]):
            found.append(ast.unparse(call.args[0]))
    return found


def test_every_product_says_its_precision():
    paths = [path.relative_to(KERNELS).as_posix() for path in KERNELS.rglob("*.py")]
    found = {(path, x) for path in paths for x in unsaid((KERNELS / path).read_text(encoding="utf-8"))}
    assert found == OF_16_BITS


@pytest.mark.parametrize("said", ["", ", input_precision='tf32'"])
def test_one_that_does_not_is_found(said):
    assert unsaid(f"x = tl.dot(a, b, acc{said})\ny = tl.dot(c, d, input_precision=PRECISION)") == ["a"]
