"""How a head's K x V state is spread over lanes, simdgroups and threadgroups, and what the backward pass keeps."""

from dataclasses import dataclass, replace

import mlx.core as mx

from .kernel import SIMD_WIDTH

# Rows of the state that a lane holds, and the fewest row lanes of a simdgroup. Sums over rows cost log2(R) shuffles for
# each column that a lane holds; in the backward pass sums over columns cost log2(32 / R) for each of its rows and sum.
# Chosen by instructions a token (`tests/mlx_support/instructions.py`), not by time.
FORWARD_ROWS, FORWARD_ROW_LANES, FORWARD_COLUMNS = 8, 4, 4
BACKWARD_ROWS, BACKWARD_ROW_LANES, BACKWARD_COLUMNS = 4, 8, 8
# Elements of the state that a lane holds. The backward pass has three of each: S, dS and the state before.
ELEMENTS = 32
MOST_SIMDGROUPS = 4
# Of the 32 KiB that a threadgroup may have on every Apple GPU, so that one can start while another ends.
THREADGROUP_BYTES = 24 * 1024
# Row sums that the simdgroups of a threadgroup exchange, in two buffers.
SHARED_ROWS = 2 * 3
# That fill a GPU: Apple's largest have 80 cores, and registers let one of 256 threads onto each.
THREADGROUPS = 80
# Tokens between the states of the middle level.
PART = 8


@dataclass(frozen=True)
class Tile:
    """R by 32 / R lanes, RPL rows and CPL columns a lane, SG simdgroups a threadgroup, blocks threadgroups a head."""

    R: int
    RPL: int
    CPL: int
    SG: int
    blocks: int

    @staticmethod
    def forward(K: int, V: int) -> "Tile":
        return Tile._of(K, V, FORWARD_ROWS, FORWARD_ROW_LANES, FORWARD_COLUMNS).apart(V)

    @staticmethod
    def backward(K: int, V: int) -> "Tile":
        return Tile._of(K, V, BACKWARD_ROWS, BACKWARD_ROW_LANES, BACKWARD_COLUMNS)

    @staticmethod
    def _of(K: int, V: int, rows: int, row_lanes: int, columns: int) -> "Tile":
        R = min(SIMD_WIDTH, max(_power_of_two(-(-K // rows)), min(row_lanes, _power_of_two(K))))
        RPL = -(-K // R)
        column_lanes = SIMD_WIDTH // R
        # no more than 32 columns a simdgroup: more would leave too few of them to fill a GPU at small batches
        CPL = max(1, min(columns, R, ELEMENTS // RPL, -(-V // column_lanes)))
        simdgroups = -(-V // (column_lanes * CPL))
        fitting = max(1, THREADGROUP_BYTES // (4 * SHARED_ROWS * R * RPL))
        SG = min(simdgroups, MOST_SIMDGROUPS, fitting)
        return Tile(R, RPL, CPL, SG, -(-simdgroups // SG))

    def apart(self, V: int) -> "Tile":
        """A simdgroup a threadgroup, for a pass that exchanges nothing: they spread over more of the GPU."""
        return replace(self, SG=1, blocks=-(-V // (SIMD_WIDTH // self.R * self.CPL)))

    @property
    def template(self) -> dict[str, int]:
        return {"R": self.R, "RPL": self.RPL, "CPL": self.CPL, "SG": self.SG}

    @property
    def threadgroup(self) -> tuple[int, int, int]:
        return (SIMD_WIDTH * self.SG, 1, 1)

    def grid(self, H: int, B: int, parts: int | None = None) -> tuple[int, int, int]:
        """parts: threadgroups a head; all blocks at once by default."""
        return (SIMD_WIDTH * self.SG * (parts or self.blocks), H, B)

    def parts(self, H: int, B: int) -> int:
        """Threadgroups that share a head's blocks in the backward pass.

        Each needs memory of its own, so there are no more than fill the GPU; the blocks are dealt out evenly.
        """
        passes = -(-self.blocks // min(self.blocks, -(-THREADGROUPS // (B * H))))
        return -(-self.blocks // passes)

    def kept_shape(self, B: int, L: int, H: int, seg: int) -> tuple[int, int, int]:
        """Of the checkpoints: [simdgroups at work, states, elements of a simdgroup]."""
        elements = SIMD_WIDTH * self.RPL * self.CPL
        return (B * H * self.parts(H, B) * self.SG, kept_states(L, seg), elements)

    def sum_dtype(self, dtype: mx.Dtype) -> mx.Dtype:
        """Of a sum over columns as the kernel writes it: float32 unless one block makes it whole."""
        return dtype if self.blocks == 1 else mx.float32


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def join(parts: mx.array) -> mx.array:
    """The sum of what the parts wrote, [parts, ...] -> [...]."""
    return parts.squeeze(0) if parts.shape[0] == 1 else parts.sum(0)


def part_of(seg: int) -> int:
    return min(PART, seg)


def kept_states(L: int, seg: int) -> int:
    """States that the backward pass keeps for L tokens, on three levels; full history keeps L."""
    part = part_of(seg)
    return -(-L // seg) + -(-seg // part) - 1 + part - 1
