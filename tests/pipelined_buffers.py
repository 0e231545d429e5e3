"""What Triton 3.6 gets wrong about buffers of loads ahead, found in the code that it makes for Hopper.

A product that nothing waits for until the next turn of its loop still reads its tiles when this turn's copies start.
Where a loop has no more buffers than loads ahead, the copies go to the very buffer that the product reads: a race. It
shows in a sequence's last chunks, whose copies past its end write zeros at once.
"""

import re

_LOOP = re.compile(r"scf\.for ")
_PRODUCT = re.compile(r"(%\S+) = ttng\.warp_group_dot (%\S+), (%\S+), .*isAsync = true")
_WAIT = re.compile(r"ttng\.warp_group_dot_wait (.*?) \{pendings = 0")
_VIEW = re.compile(r"(%\S+) = ttg\.memdesc_(?:index|trans|subslice|reinterpret) (%[\w.]+)")
_ALLOCATION = re.compile(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x")
_COPY = re.compile(r"ttg\.async_copy_global_to_local \S+, (%\S+)")


def raced(ttgir: str) -> list[str]:
    """Products of a loop's end that read a buffer which the copies behind them write to."""
    of: dict[str, str] = {}
    buffers: dict[str, int] = {}
    ahead: dict[str, int] = {}
    found, running = [], {}
    is_in_loop = False
    for line in ttgir.splitlines():
        if _LOOP.search(line):
            is_in_loop, running = True, {}
        elif match := _ALLOCATION.search(line):
            buffers[match[1]], ahead[match[1]] = int(match[2]), 0
        elif match := _VIEW.search(line):
            of[match[1]] = of.get(match[2], match[2])
        elif match := _PRODUCT.search(line):
            running[match[1]] = [of.get(x, x) for x in (match[2], match[3])]
        elif match := _WAIT.search(line):
            running.clear()
        elif (match := _COPY.search(line)) and (tiles := of.get(match[1])) in buffers:
            if not is_in_loop:
                ahead[tiles] += 1
            elif buffers[tiles] <= ahead[tiles]:
                found += [f"{product} reads {tiles}" for product, reads in running.items() if tiles in reads]
        elif "scf.yield" in line:
            is_in_loop = False
    return found
