"""The constraints of FlashRNN's fused kernel, with every variable of the paper's appendix B, as ConstrINT models.

Along an axis A (B batch rows, G gates, S states), of size S_A, tiles of E_A elements are shared out over W_A warps of a
block, B_A blocks of the grid and L_A turns of a loop: S_A = E_A W_A B_A L_A. The recurrent matrix is stationary: of the
turns along the axis that is summed over, `reg` many keep their tiles in registers and `sram` many in shared memory.

The forward pass sums over states (size D) and is laid out along gates (size g D); backward has the two swapped.
The paper says that registers and shared memory are polynomials of these variables and does not print them. Those here
follow from what its algorithm 2 holds where; test_flashrnn_model.py sets them beside the paper's results.
"""

from dataclasses import dataclass

from holdfast.planner import Device
from holdfast.planner.constrint import Expression, Model, Variable, divides, minimum

WARP = 32
BF16 = 2  # bytes
FP32 = 4
# Elements added to each row in shared memory, against bank conflicts.
PADDING = 8


@dataclass(frozen=True)
class Kernel:
    """gates: recurrent inputs of a cell. heads: of one layer. threads: at most so many a block, a fourth of 1024 as in
    the paper. reserve: registers of each thread that hold neither weights, nor a tile of states, nor sums: addresses,
    counters, the pointwise part; 0 is what would fit if the compiler needed none. may_spill: lets a thread have more
    registers than the hardware addresses, as long as the block's registers suffice.
    """

    head_dim: int
    batch: int = 8
    heads: int = 1
    gates: int = 4
    threads: int = 256
    reserve: int = 0
    may_spill: bool = False


@dataclass(frozen=True)
class Axis:
    tile: Variable
    warps: Variable
    blocks: Variable
    loops: Variable

    @property
    def in_block(self) -> Expression:
        """Elements that a block covers."""
        return self.tile * self.warps * self.loops


def axis(
    model: Model, name: str, size: int, tiles: tuple[int, ...], blocks: str, auxiliary_loops: bool = False
) -> Axis:
    """Blocks come first, then warps: what is left is looped over."""
    several = range(1, size + 1)
    made = Axis(
        blocks=model.variable(f"B_{name}", several, order=blocks),
        tile=model.variable(f"E_{name}", tiles, order="largest"),
        warps=model.variable(f"W_{name}", several, order="largest"),
        loops=model.variable(f"L_{name}", several, order="smallest", auxiliary=auxiliary_loops),
    )
    model.add(made.tile * made.warps * made.blocks * made.loops == size, f"tiles cover the axis {name}")
    return made


def fused(device: Device, kernel: Kernel, summed: str) -> Model:
    """summed: the axis that the matrix product sums over, "S" in the forward pass and "G" in the backward pass."""
    limits = (device.sms, device.registers_per_block, device.registers_per_thread, device.shared_per_block)
    assert None not in limits, f"{device.name}: not all limits are known"
    model = Model()
    sizes = {"S": kernel.head_dim, "G": kernel.gates * kernel.head_dim}
    across = "G" if summed == "S" else "S"
    # Summing over blocks goes through memory and a grid barrier, so the grid spreads along the other axis.
    out = axis(model, across, sizes[across], (8, 16, 32), blocks="largest")
    inner = axis(model, summed, sizes[summed], (16,), blocks="smallest", auxiliary_loops=True)
    batch = axis(model, "B", -(-kernel.batch // 8) * 8, (8, 16, 32), blocks="largest")
    heads = model.variable("B_H", range(1, kernel.heads + 1), order="largest")
    in_registers = model.variable(f"L_{summed}_reg", range(sizes[summed] + 1), order="largest")
    in_shared = model.variable(f"L_{summed}_sram", range(sizes[summed] + 1), order="smallest")

    model.add(divides(heads, kernel.heads), "heads are shared out evenly")
    model.add(batch.tile * out.tile == 256, "one tensor-core tile: 8 x 32, 16 x 16 or 32 x 8")
    model.add(in_registers + in_shared == inner.loops, "every tile of R has its place")

    threads = WARP * out.warps * inner.warps * batch.warps
    model.add(threads <= kernel.threads, "threads of a block")
    grid = out.blocks * inner.blocks * batch.blocks * heads
    model.add(grid <= device.sms, "all blocks run at once")

    # In units of two bytes, half a register. A warp holds R, the bias, one tile of states and one of sums.
    weights = out.loops * in_registers * inner.tile * out.tile
    bias = out.loops * out.tile
    working = batch.tile * inner.tile + 2 * batch.tile * out.tile
    reserved = 2 * WARP * kernel.reserve
    warp = weights + bias + working + reserved
    if not kernel.may_spill:
        model.add(warp <= 2 * WARP * device.registers_per_thread, "registers of a thread")
    warps = out.warps * inner.warps * batch.warps
    model.add(warps * warp <= 2 * device.registers_per_block, "registers of a block")

    rows = inner.tile * inner.warps * in_shared
    matrix = BF16 * out.in_block * (rows + PADDING * minimum(in_shared, 1))
    sums = FP32 * inner.warps * batch.tile * batch.warps * (out.in_block + PADDING)
    model.add(matrix + sums <= device.shared_per_block, "shared memory of a block")
    return model


def forward(device: Device, kernel: Kernel) -> Model:
    return fused(device, kernel, summed="S")


def backward(device: Device, kernel: Kernel) -> Model:
    return fused(device, kernel, summed="G")
