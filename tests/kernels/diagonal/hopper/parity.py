"""What the Hopper scan must do beyond agreeing with the oracle: on a GPU, and on the emulator."""

import torch

from holdfast.kernels.diagonal.hopper.backend import HopperScan
from holdfast.recurrences import RECURRENCES
from kernels.diagonal.triton import parity as scan_parity


def plans(pairs, groups=1):
    """(forward, backward)."""
    if groups > 1:
        plan = scan_parity.hopper(32 if pairs else 64, 32, 2, groups, groups)
        return plan, plan
    if pairs:
        return scan_parity.hopper(32, 16, 4, 1), scan_parity.hopper(32, 32, 3, 1)
    return scan_parity.hopper(128, 16, 8, 2), scan_parity.hopper(128, 32, 3, 2)


def check_recomputation(name, length, groups=1, channels=160, device="cpu"):
    """The gradient of the last gate is the state before it where that of the final state is 1: it must have the bits
    that a forward pass ends with which stops there. Such a pass has other tiles, and masks. With several groups, the
    first step of each goes on from a state that is put together, with other roundings: length is to end elsewhere."""
    forward, backward = plans(False, groups)
    arguments = scan_parity.example(name, torch.float16, length, channels=channels, device=device)
    arguments["a"] = arguments["a"].float()
    call, _ = RECURRENCES[name].map(**arguments)
    scan, entries = HopperScan(), torch.full((length // 32 * 2 + 9, channels), torch.nan, device=device)
    _, final = scan.forward(forward, call, None, entries)
    grad_a, *_ = scan.backward(backward, call, None, None, None, torch.ones_like(final), entries)
    cut = call._replace(a=call.a[:, :-1], x=call.x[:, :-1])
    _, before = scan.forward(forward, cut, None)
    assert torch.equal(grad_a[:, -1], before)


def check_strides(name, length, channels=96, groups=1, device="cpu"):
    """Inputs that are views of wider tensors, at multiples of 16 bytes and not, give the bits of their copies."""
    forward, backward = plans(name == "rotlru", groups)
    call, _ = RECURRENCES[name].map(
        **scan_parity.example(name, torch.float16, length, channels=channels, device=device)
    )
    scan = HopperScan()

    def run(call):
        o, final = scan.forward(forward, call, None)
        return [o, final, *scan.backward(backward, call, None, None, None, final)]

    expected = run(call)
    for before, after in ((32, 64), (1, 3)):

        def within(x, before=before, after=after):
            if x is None:
                return None
            wide = torch.nn.functional.pad(x, (before, after))
            return wide[..., before : before + x.shape[-1]]

        strided = call._replace(a=within(call.a), x=within(call.x), theta=within(call.theta))
        for x, y in zip(run(strided), expected, strict=True):
            assert (x is None and y is None) or torch.equal(x, y)
