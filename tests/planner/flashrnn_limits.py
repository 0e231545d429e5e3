"""Which head dimensions fit FlashRNN's fused kernels, beside the list of the paper's appendix H.1.

    PYTHONPATH=src:tests python -m planner.flashrnn_limits

writes docs/planner/flashrnn-head-limits.md.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from holdfast.planner import Device
from holdfast.planner.constrint import Infeasible
from planner.flashrnn_model import Kernel, backward, forward

PAGE = Path(__file__).parents[2] / "docs" / "planner" / "flashrnn-head-limits.md"

SMALL = [1280, 1312, 1344, 1440, 1536, 1600, 1632, 1728, 1824]
EVERY_32 = list(range(1344, 1825, 32))
PAPER = {
    "rtx3090": SMALL,
    "a40": SMALL,
    "a100": [1280, 1312, *EVERY_32, 1920, 2016, 2080, 2112, 2304],
    "h100": [1280, 1312, *range(1344, 2113, 32), 2208, 2240, 2304, 2400, 2496, 2560, 2688],
}
SEARCHED = range(1280, 3009, 16)


def fits(device: Device, kernel: Kernel) -> bool:
    """Whether both passes have a solution."""
    try:
        for direction in (forward, backward):
            direction(device, kernel).first()
    except Infeasible:
        return False
    return True


@cache
def fitting(device: Device, may_spill: bool, reserve: int = 0) -> tuple[int, ...]:
    """Head dimensions from 1280 for which both passes of an LSTM fit, one head, a batch of 8."""
    # with one limit more, or a tighter one, no others fit
    if reserve:
        searched = fitting(device, may_spill=may_spill)
    else:
        searched = SEARCHED if may_spill else fitting(device, may_spill=True)
    kernels = (Kernel(head_dim=size, may_spill=may_spill, reserve=reserve) for size in searched)
    return tuple(kernel.head_dim for kernel in kernels if fits(device, kernel))


def listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(sizes))) or "none"


def largest(sizes: Iterable[int]) -> str:
    return str(max(sizes, default="none"))


def rows() -> tuple[list[str], list[str]]:
    """Of the page's two tables."""
    by_device, by_reserve = [], []
    for name, paper in PAPER.items():
        device = Device.named(name)
        strict, loose = fitting(device, may_spill=False), fitting(device, may_spill=True)
        by_device.append(
            f"| {name} | {device.sms} | {(device.shared_per_block or 0) // 1024} | {max(paper)} | {largest(loose)} | "
            f"{largest(strict)} | {len(set(paper) & set(loose))} of {len(paper)} | "
            f"{len(set(paper) & set(strict))} of {len(paper)} |"
        )
        by_reserve.append(
            f"| {name} | {listed(set(loose) - set(paper))} | {listed(set(paper) - set(loose))} | "
            f"{listed(set(strict) - set(paper))} | {listed(set(paper) - set(strict))} | "
            f"{largest(fitting(device, may_spill=False, reserve=32))} |"
        )
    return by_device, by_reserve


TEMPLATE = """\
# The largest heads of FlashRNN's fused kernels

Written by `PYTHONPATH=src:tests python -m planner.flashrnn_limits`; a test compares this page with that command's.

FlashRNN keeps the recurrent matrix in registers and shared memory for the whole sequence, so the head dimension D has a
limit. Appendix H.1 of the paper lists the D from 1280 up for which both passes of the LSTM run.
`tests/planner/flashrnn_model.py` states the constraints with every variable of appendix B, and ConstrINT decides for
each multiple of 16 from 1280 to 3008 whether both passes have a solution.

Assumed: one head, four gates, bf16 weights, a batch of 8, at most 256 threads a block (the paper's fourth of 1024), no
registers beside weights, bias, one tile of states and one of sums. H.1 does not state the batch. 8 is the default of
FlashRNN's published code, it makes the tiles of gates and states 32 wide, and every D listed is a multiple of 32.

'With spilling' bounds the registers of a block alone; 'without' also bounds each thread's at 255, which is what the
hardware addresses. The first was added after a comparison with the second alone, in which some listed D did not fit.

| GPU | SMs | shared memory a block, KiB | largest D, paper | with spilling | without | {first} |
| --- | --- | --- | --- | --- | --- | --- | --- |
{counts}

| GPU | with spilling: fits, not listed | listed, does not fit | {last} |
| --- | --- | --- | --- | --- | --- |
{differences}

## What the differences mean

- With spilling, every D in the paper's lists fits, and the largest are equal on all four GPUs. The model allows what
  the paper reports, and a few D more.
- Without spilling, some listed D do not fit. For D = 1600 on the RTX 3090 the matrix wants 80 of the 82 SMs and 250 KiB
  on each, and the warps that divide 1600 evenly are then at most 5 a block, whose threads cannot address enough
  registers. FlashRNN's published constraints bound the registers of a block, not of a thread, and its compiler may put
  the excess in local memory. That its kernels spill there is inferred, not measured.
- A few D fit here and are not listed. The paper builds each kernel and searches for the number of cached tiles with the
  compiler in the loop, and it does not print its polynomials, which may count partial sums and padding otherwise. Which
  of the two leaves these out cannot be told from the paper.
- The paper gives the RTX 3090 and the A40 128 KB of SRAM. That is the L1 cache and shared memory together; a block can
  have 99 KiB of it, which is the bound here.
- A kernel needs registers for addresses and the pointwise part too. The last column sets 32 a thread aside, without
  spilling, which is closer to what a kernel can expect.
"""


def page() -> str:
    counts, differences = rows()
    return TEMPLATE.format(
        first="listed D that fit with spilling | without",
        last="without: fits, not listed | listed, does not fit | largest D without, 32 registers a thread aside",
        counts="\n".join(counts),
        differences="\n".join(differences),
    )


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
