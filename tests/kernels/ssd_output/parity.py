"""The kernels of the layer's end, called as their backend is, against the PyTorch form in float64."""

import torch

from holdfast.kernels.ssd_output.call import OutputCall
from holdfast.kernels.ssd_output.torch.backend import PyTorchOutput
from holdfast.kernels.ssd_output.triton.backend import TritonOutput
from parity import relative_error

NAMES = ("y", "do", "dD", "dz", "dweight", "dx")


def example(B=2, T=7, H=4, P=6, G=2, dtype=torch.float32, D="H", z=True, norm=True, odd=1, device="cpu"):
    """A call, x and z slices of wider tensors, as a projection and a convolution leave them. odd: channels beside."""
    draw = torch.Generator().manual_seed(P)

    def normal(*shape):
        return torch.randn(shape, generator=draw)

    x, gate = ((2 * normal(B, T, H * P + odd)).to(device, dtype)[..., odd:].unflatten(-1, (H, P)) for _ in range(2))
    skip = {"H": normal(H), "HP": normal(H, P), "": None}[D]
    return OutputCall(
        normal(B, T, H, P).to(device, dtype),
        x,
        None if skip is None else skip.to(device),
        gate if z else None,
        normal(G, H * P // G).to(device) if norm else None,
        1e-3,
    )


def run(backend, call, dy, room=None):
    y = backend.forward(call)
    do, dD, dz, dweight = backend.backward(call, dy, room)
    dx = None
    if call.D is not None:
        # of the op itself, some other gradient
        dx = torch.empty_like(y)
        backend.add_skip(dy.contiguous(), do, call.D, dx)
    found = zip(NAMES, (y, do, dD, dz, dweight, dx), strict=True)
    return {name: x for name, x in found if x is not None}


def check(call):
    """At most twice the error of the PyTorch form, whose roundings are the same."""
    draw = torch.Generator().manual_seed(1)
    B, T, H, P = call.o.shape
    # a gradient in a wider tensor too
    dy = torch.randn(B, T, H * P + 3, generator=draw).to(call.o)[..., 3:].unflatten(-1, (H, P))
    wide = {name: x.double() for name, x in call._asdict().items() if isinstance(x, torch.Tensor)}
    right = run(PyTorchOutput(), call._replace(**wide), dy.double())
    same, got = run(PyTorchOutput(), call, dy), run(TritonOutput(), call, dy)
    assert {name: (x.dtype, x.shape) for name, x in got.items()} == {
        name: (x.dtype, x.shape) for name, x in same.items()
    }
    assert all(x.is_contiguous() for x in got.values())
    for name, x in right.items():
        mine, theirs = (relative_error(found[name].double(), x) for found in (got, same))
        assert mine <= max(2 * theirs, 1e-6), (name, mine, theirs)
    if call.z is not None:
        # into a part of a wider tensor, of which nothing else changes
        room = torch.zeros(B, T, H * P + 8, dtype=call.o.dtype, device=call.o.device)
        TritonOutput().backward(call, dy, room[..., 8:].unflatten(-1, (H, P)))
        # compiled for other strides, which may sum a row in another order
        limit = 1e-6 if room.dtype == torch.float32 else 1e-3
        assert relative_error(room[..., 8:].unflatten(-1, (H, P)), got["dz"]) <= limit
        assert not room[..., :8].any()
    if call.D is not None:
        # in place
        held = dy.contiguous().clone()
        TritonOutput().add_skip(held, got["do"], call.D, held)
        assert torch.equal(held, got["dx"])


def interpreted():
    """What the interpreter has time for; memory that a kernel leaves unwritten is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    check(example())
    check(example(G=1, D="HP", odd=8, T=150))
    check(example(G=4, D="", dtype=torch.float16))
    check(example(z=False, odd=0))
    check(example(norm=False))
    check(example(norm=False, z=False, D="HP"))
    check(example(norm=False, D="", H=3, P=5))
    # several blocks of channels, the last in part
    check(example(norm=False, H=5, P=260, T=3, odd=16, dtype=torch.float16))
    check(example(T=1, B=1, G=1))
    check(example(T=0))
    # rows beyond the last are 0, whose length nothing is added to
    check(example(T=5)._replace(eps=0.0))
    # heads that lie in another order, channels too
    call = example()
    turned = call.x.transpose(2, 3).contiguous().transpose(2, 3)
    check(call._replace(x=turned, z=call.z.transpose(1, 2).contiguous().transpose(1, 2)))
    # one token for all
    check(call._replace(x=call.x[:, :1].expand(call.x.shape)))
    print("all checked")
