"""How a head's K x V state is spread over lanes, simdgroups and threadgroups, and what the backward pass keeps."""

from dataclasses import dataclass

import mlx.core as mx

from .kernel import SIMD_WIDTH

# Row lanes of a simdgroup. Sums over rows cost log2(R) shuffles for each column that a lane holds, sums over columns
# log2(32 / R) for each of its rows and three sums: at K = 64, 28 a token with 16 row lanes, 54 with 8, 40 with 32.
# Beyond that 32 cost fewer, and registers for a token's rows run out first. Counted, not timed.
ROW_LANES = 16
SMALL_K = 64
# Elements of the state that a lane holds: 16 of S, 16 of dS and 16 of the state before leave room in 128 registers.
ELEMENTS = 16
MOST_SIMDGROUPS = 8
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
    def of(K: int, V: int) -> "Tile":
        R = min(ROW_LANES if K <= SMALL_K else SIMD_WIDTH, 1 << (K - 1).bit_length())
        RPL = -(-K // R)
        column_lanes = SIMD_WIDTH // R
        # 4 columns: more would leave too few simdgroups to fill a GPU at small batches
        CPL = max(1, min(4, ELEMENTS // RPL, -(-V // column_lanes)))
        simdgroups = -(-V // (column_lanes * CPL))
        fitting = max(1, THREADGROUP_BYTES // (4 * SHARED_ROWS * R * RPL))
        SG = min(simdgroups, MOST_SIMDGROUPS, fitting)
        return Tile(R, RPL, CPL, SG, -(-simdgroups // SG))

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


def join(parts: mx.array) -> mx.array:
    """The sum of what the parts wrote, [parts, ...] -> [...]."""
    return parts.squeeze(0) if parts.shape[0] == 1 else parts.sum(0)


def part_of(seg: int) -> int:
    return min(PART, seg)


def kept_states(L: int, seg: int) -> int:
    """States that the backward pass keeps for L tokens, on three levels; full history keeps L."""
    part = part_of(seg)
    return -(-L // seg) + -(-seg // part) - 1 + part - 1
