"""Arrays of more than 2^31 elements: the end of a huge call has the bits of a small call of its own.

The huge arrays are address space: a page that nothing touches takes no memory, and only the last threadgroup runs.
"""

import mmap
import sys
from math import prod

import numpy as np
import pytest

from mlx_support.cases import SCANS
from mlx_support.cpu import execute

FAR = 2**31
# of Linux; Python names it from 3.13 on
MAP_NORESERVE = 0x4000
DIAGONAL = dict.fromkeys(("a", "cs", "sn", "x", "h0", "y", "last", "dy", "dlast", "da", "dcs", "dsn", "dx", "dh0"), 0)
STATES = dict.fromkeys(("S0", "last", "dlast", "dS0"), 1) | {"kept": 0}
TOKENS = dict.fromkeys(("q", "k", "v", "gates", "beta", "u", "delta", "B", "C", "y", "dy", "dv", "du"), 2)
PARTS = dict.fromkeys(("dq", "dk", "dgates", "dbeta", "dB", "dC", "ddelta"), 3) | {"A": 0, "dA": 2}
# a small call of one threadgroup, the axis of each array that the huge call has more of, and that of the grid
CALLS = {
    "rglru": ({"B": 1, "L": 3, "D": 32}, DIAGONAL, 1),
    "rotlru": ({"B": 1, "L": 3, "P": 32}, DIAGONAL, 1),
    "gla": ({"B": 1, "L": 40, "H": 1, "K": 8, "V": 8, "vector": True}, STATES | TOKENS | PARTS, 1),
    "ssd": ({"B": 1, "L": 40, "H": 1, "G": 1, "P": 8, "N": 8}, STATES | TOKENS | PARTS, 1),
    "kda": ({"B": 1, "L": 40, "H": 1, "G": 1, "K": 8, "V": 8}, STATES | TOKENS | PARTS, 1),
}


def reserved(shape):
    """Zeros that take no memory until they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, 4 * prod(shape), flags=flags), np.float32).reshape(shape)


def last(huge, small, axis):
    """The part of a huge array where the small call's lies: its end along the axis."""
    part = [slice(None)] * huge.ndim
    part[axis] = slice(huge.shape[axis] - small.shape[axis], None)
    return huge[tuple(part)]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, which hands out address space without memory")
@pytest.mark.parametrize("name", CALLS)
def test_indices_are_64_bit(metal, name):
    sizes, axes, grid_axis = CALLS[name]
    SCANS[name](**sizes).run()
    forward, backward = metal.launches
    times = FAR // forward.outputs["y"].size + 2
    for launch in (forward, backward):
        small = {key: np.array(x) for key, x in (launch.inputs | launch.outputs).items()}
        shapes = {}
        for key, x in small.items():
            shape = list(x.shape)
            shape[axes[key]] *= times
            shapes[key] = tuple(shape)
        huge = {key: reserved(shape) for key, shape in shapes.items()}
        for key in launch.inputs:
            last(huge[key], small[key], axes[key])[...] = small[key]
        grid, first = list(launch.grid), [0, 0, 0]
        grid[grid_axis] *= times
        first[grid_axis] = times - 1
        # what grows is no part of the source: the small call's serves the huge one
        execute(launch.source, huge, shapes, grid, launch.threadgroup, seed=1, first=first)
        for key in launch.outputs:
            assert np.array_equal(last(huge[key], small[key], axes[key]), small[key]), key
        assert max(x.size for x in huge.values()) > FAR
