"""The kernels of causal_conv1d, called as their backend is, against its PyTorch form in float64."""

import torch

from holdfast.kernels.conv.call import ConvCall
from holdfast.kernels.conv.torch.backend import PyTorchConv
from holdfast.kernels.conv.triton.backend import TritonConv
from holdfast.kernels.slots import Slots
from holdfast.ops.causal_conv1d import _pooled
from holdfast.planner import Plan
from parity import relative_error

NAMES = ("y", "final", "dx", "dweight", "dbias", "dinitial")


def plan(block=16, segments=4, steps=2, chunks=3, warps=4):
    values = {"block": block, "segments": segments, "steps": steps, "chunks": chunks, "warps": warps}
    return Plan("triton", tuple(values.items()))


def example(
    B=2, T=37, D=20, W=4, dtype=torch.float32, bias=True, state=True, lengths=None, activation="silu", heads=0,
    head_dim=0, device="cpu",
):  # fmt: skip
    """A call, x a slice of a wider tensor as a projection leaves it, and its offsets. lengths: of packed sequences.

    heads: of head_dim channels, which are normalised.
    """
    draw = torch.Generator().manual_seed(D)

    def normal(*shape):
        return torch.randn(shape, generator=draw)

    sequences, offsets = B, None
    if lengths is not None:
        B, T, sequences = 1, sum(lengths), len(lengths)
        offsets = torch.tensor((0, *lengths), device=device).cumsum(0)
    x = normal(B, T, 2 * D + 3).to(device, dtype)[..., D : 2 * D]
    call = ConvCall(
        x,
        normal(D, W).to(device) / W,
        normal(D).to(device) if bias else None,
        normal(sequences, W - 1, D).to(device) if state else None,
        activation,
        heads,
        head_dim,
    )
    return call, offsets


def run(backend, which, call, offsets, grads, final=True):
    """A layer's call, whose heads are normalised, has the gradients of its parts, and that of x in a wider tensor."""
    y, last = backend.forward(which, call, offsets, final)
    grad_y, grad_final = grads
    into = None
    if call.heads:
        halves = [call.heads // 2 * call.head_dim] * 2
        grad_y = tuple(x.contiguous() for x in grad_y.split([*halves, call.x.shape[2] - sum(halves)], -1))
        into = torch.full_like(grads[0].repeat(1, 1, 2), torch.nan)[..., 3 : call.x.shape[2] + 3]
    found = [y, last, *backend.backward(which, call, offsets, grad_y, grad_final, into)]
    if into is not None:
        assert found[2] is into
        found[2] = into.contiguous()
    return {name: x for name, x in zip(NAMES, found, strict=True) if x is not None}


def errors(call, offsets, which, final=True):
    """name -> (error of the kernel, error of the PyTorch form in the same dtype), relative to float64."""
    draw = torch.Generator().manual_seed(1)
    batch, length, channels = call.x.shape
    sequences = batch if offsets is None else offsets.shape[0] - 1
    # a gradient in a wider tensor too
    grad_y = torch.randn(batch, length, channels + 1, generator=draw).to(call.x)[..., :channels]
    grad_final = torch.randn(sequences, call.weight.shape[1] - 1, channels, generator=draw).to(call.x.device)
    grads = grad_y, grad_final if final else None
    wide = call._replace(**{name: x.double() for name, x in call._asdict().items() if isinstance(x, torch.Tensor)})
    exact = tuple(None if x is None else x.double() for x in grads)
    right = run(PyTorchConv(), Plan("pytorch"), wide, offsets, exact, final)
    same = run(PyTorchConv(), Plan("pytorch"), call, offsets, grads, final)
    got = run(TritonConv(), which, call, offsets, grads, final)
    assert {name: x.dtype for name, x in got.items()} == {name: x.dtype for name, x in same.items()}
    assert all(x.is_contiguous() for x in got.values())
    return {
        name: (relative_error(got[name].double(), x), relative_error(same[name].double(), x))
        for name, x in right.items()
    }


def check(call, offsets, which=None, final=True):
    """At most twice the error of the PyTorch form, whose one rounding of a float32 result is the same."""
    found = errors(call, offsets, which or plan(), final)
    assert all(mine <= max(2 * theirs, 1e-6) for mine, theirs in found.values()), found


def decoded(call, state):
    """The kernel of decoding against the forward pass, token by token and several at once."""
    y, last = PyTorchConv().forward(Plan("pytorch"), call._replace(initial_state=state.float()), None, True)
    held, parts = state.clone(), []
    for tokens in call.x.split((1, 1, 5, call.x.shape[1] - 7), 1):
        parts.append(TritonConv().update(call._replace(x=tokens), held))
    assert relative_error(torch.cat(parts, 1).double(), y.double()) <= (1e-6 if y.dtype == torch.float32 else 2e-3)
    assert torch.equal(held, last.to(held.dtype))


def decoded_in_a_pool(call, dtype):
    """The kernel on a pool of states against PyTorch, token by token: in place, padded, elsewhere, after each token."""
    batch, length, channels = call.x.shape
    assert batch == 2
    draw = torch.Generator().manual_seed(3)
    pool = torch.randn(5, 2 * (call.weight.shape[1] - 1), channels, generator=draw).to(call.x.device, dtype)
    # slots farther apart than a state
    pool = pool[:, : call.weight.shape[1] - 1]

    def numbers(*values):
        return torch.tensor(values, dtype=torch.int32, device=call.x.device)

    each = torch.full((2, length), -1, dtype=torch.int32, device=call.x.device)
    each[0, -1], each[1, 0] = 1, 3
    for slots in (
        Slots(numbers(4, 0), numbers(4, 0), None),
        Slots(numbers(-1, 2), numbers(1, 2), None),
        Slots(numbers(5, 2), numbers(1, 9), None),
        Slots(numbers(4, 0), numbers(1, 0), numbers(0, length - 1)),
        Slots(numbers(4, 0), each, None),
    ):
        mine, right, again = pool.clone(), pool.clone(), pool.clone()
        y = TritonConv().update(call, mine, slots)
        expected = _pooled(PyTorchConv(), Plan("pytorch"), call, right, slots)
        assert relative_error(y.double(), expected.double()) <= (1e-6 if y.dtype == torch.float32 else 2e-3)
        assert torch.equal(mine, right)
        if not slots.is_each and slots.accepted is None and torch.equal(slots.read, slots.write):
            steps = [TritonConv().update(call._replace(x=x), again, slots) for x in call.x.split(1, 1)]
            assert torch.equal(torch.cat(steps, 1), y)
            assert torch.equal(again, mine)


def checked(*what, which=None, final=True, **options):
    check(*example(*what, **options), which, final)


def interpreted():
    """What the interpreter has time for; memory that a kernel leaves unwritten is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    checked()
    checked(bias=False, state=False, final=False, activation="")
    checked(W=1, T=5)
    checked(W=2, T=24, D=16, state=False)
    checked(W=7, T=29, dtype=torch.float16)
    # sequences of no token, fewer than the taps reach, one more than a segment and than a tile
    checked(lengths=(5, 1, 0, 7, 25, 0, 2))
    checked(lengths=(0, 24, 3), state=False, dtype=torch.float16)
    checked(lengths=(0, 0), activation="")
    checked(T=3, which=plan(segments=2, steps=4, chunks=1))
    # queries and keys of a layer; heads that fill their blocks, and that do not
    checked(heads=2, head_dim=6, bias=False)
    checked(D=48, heads=2, head_dim=16, W=3, dtype=torch.float16, state=False, final=False, bias=False)
    checked(D=60, heads=4, head_dim=9, W=2, lengths=(5, 1, 0, 27, 2), bias=False)
    checked(D=24, heads=2, head_dim=12, T=5, activation="")
    checked(T=0)
    for state in (torch.float32, torch.float16):
        call, _ = example(T=9, state=False, dtype=torch.float16)
        decoded(call, torch.randn(2, 3, 20).to(state))
        decoded_in_a_pool(example(T=4, state=False, dtype=torch.float16)[0], state)
    decoded_in_a_pool(example(T=2, W=1, state=False)[0], torch.float32)
    print("all checked")


def apart(device="cpu"):
    """What other sequences hold, NaN too, reaches neither outputs nor gradients."""
    for heads in (0, 2):
        _apart(heads, device)
    print("none leaks")


def _apart(heads, device):
    call, offsets = example(lengths=(5, 30, 4), D=16, heads=heads, head_dim=3 * heads, device=device)
    grad_y, grad_final = torch.randn(1, 39, 16).to(device), torch.randn(3, 3, 16).to(device)
    clean = run(TritonConv(), plan(), call, offsets, (grad_y, grad_final))
    for x in (call.x, grad_y):
        x[:, :5], x[:, 35:] = torch.nan, torch.nan
    call.initial_state[::2] = torch.nan
    spoilt = run(TritonConv(), plan(), call, offsets, (grad_y, grad_final))
    assert spoilt["y"][:, :5].isnan().all()
    for name in ("y", "dx"):
        assert torch.equal(clean[name][:, 5:35], spoilt[name][:, 5:35]), name
    for name in ("final", "dinitial"):
        assert torch.equal(clean[name][1], spoilt[name][1]), name
