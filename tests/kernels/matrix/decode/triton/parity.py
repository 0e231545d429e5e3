"""The decoding kernel, called as its backend is, against the step loop: interpreted and on a GPU."""

import torch

import layouts
from holdfast.kernels.matrix.decode.triton.backend import TritonDecode
from holdfast.planner import Plan
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from holdfast.recurrences.oracle_matrix import matrix_steps
from parity import cast, relative_error

# whose token is one step
MATRIX = tuple(
    name
    for name, recurrence in RECURRENCES.items()
    if recurrence.family == "matrix" and name not in ("gated_delta_product", "rwkv7")
)


def check(name, dtype=torch.float32, columns=16, device="cpu", views=None, **sizes):
    """views: of which kind of layouts.view_of the first tensor is, where they are views."""
    draw = Draw(0, dtype, device)
    call, _ = RECURRENCES[name].map(**RECURRENCES[name].example(draw, Sizes(**({"B": 2, "T": 1, "H": 4} | sizes))))
    check_call(call, name, columns, views, **sizes)


def check_erase_key(name, heads, before, views=None, **sizes):
    """A delta rule's call with an erase key of so many heads beside its write key."""
    draw = Draw(0)
    call, _ = RECURRENCES[name].map(**RECURRENCES[name].example(draw, Sizes(**({"B": 2, "T": 1, "H": 4} | sizes))))
    e = draw.normal(2, 1, heads, call.k.shape[3])
    check_call(call._replace(e=e, erase_before_decay=before), f"{name} e", 16, views, **sizes)


def check_call(call, name, columns, views, **sizes):
    dtype = call.v.dtype
    plan = Plan("decode", (("columns", columns), ("warps", 4)))
    if views is not None:
        call = layouts.views(call, views)
    o, state = TritonDecode().forward(plan, call, None)
    right = matrix_steps(type(call)(*cast(list(call[:8]), torch.float64), *call[8:]))
    errors = [relative_error(x.double(), y) for x, y in zip((o, state), right, strict=True)]
    assert errors[0] <= (2.0**-8 if dtype == torch.bfloat16 else 2e-6), (name, sizes, errors)
    assert errors[1] <= 2e-6, (name, sizes, errors)
    if call.stabilizer is None:
        held = call.initial_state.clone(memory_format=torch.contiguous_format)
        again = TritonDecode().step(plan, call._replace(initial_state=held), held)
        assert torch.equal(again, o)
        assert torch.equal(held, state)
    print(name, sizes, [f"{error:.0e}" for error in errors])


def interpreted():
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name in MATRIX:
        check(name, Hq=2, K=24, V=20)
        check(name, views=0, Hq=2, K=8, V=6)
        check(name, views=1, H=2, K=8, V=6)
    for name in ("delta_rule", "gated_delta_rule", "kda"):
        for heads in (1, 2, 4):
            for before in (False, True):
                check_erase_key(name, heads, before, Hq=2, K=24, V=20)
                check_erase_key(name, heads, before, views=heads, K=8, V=6)
