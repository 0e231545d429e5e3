"""The numbers of proposal 032, from the data-movement model.

    PYTHONPATH=src:tests python -m planner.proposal_032

prints the table of docs/planner/data-movement.md; a test compares the two.
"""

from collections.abc import Mapping
from pathlib import Path

from holdfast.planner import Device
from holdfast.planner.movement import Chain, Choice, Stage, Tensor, best, movement

PAGE = Path(__file__).parents[2] / "docs" / "planner" / "data-movement.md"

KIB = 1024
ELEMENT = 2  # bytes
ORDER = ("m", "l", "k", "n", "s")


def intra_chunk(chunk: int, width: int) -> Chain:
    """O = (Q K^T, masked) V of one chunk. k and n are both `width` long; the first product sums over k alone."""
    return Chain(
        {"m": chunk, "l": chunk, "k": width, "n": width},
        (
            Tensor("Q", ("m", "k")),
            Tensor("K", ("l", "k")),
            Tensor("S", ("m", "l")),
            Tensor("V", ("l", "n")),
            Tensor("O", ("m", "n")),
        ),
        (Stage("scores", ("Q", "K"), "S"), Stage("output", ("S", "V"), "O")),
    )


def three_stages(chunk: int, width: int, state: int) -> Chain:
    """The same with the state's part G h added, G [chunk, state] and h [state, width], and the result gated."""
    return Chain(
        {"m": chunk, "l": chunk, "k": width, "n": width, "s": state},
        (
            Tensor("Q", ("m", "k")),
            Tensor("K", ("l", "k")),
            Tensor("S", ("m", "l")),
            Tensor("V", ("l", "n")),
            Tensor("P", ("m", "n")),
            Tensor("G", ("m", "s")),
            Tensor("h", ("s", "n")),
            Tensor("gate", ("m", "n")),
            Tensor("O", ("m", "n")),
        ),
        (
            Stage("scores", ("Q", "K"), "S"),
            Stage("output", ("S", "V"), "P"),
            Stage("correct and gate", ("P", "G", "h", "gate"), "O"),
        ),
    )


def fused(chain: Chain, tiles: Mapping[str, int] | None = None) -> int:
    """Elements through memory in one nest m l k n s; tiles: whole axes but for those given."""
    order = [axis for axis in ORDER if axis in chain.extents]
    return movement(chain, order, {**chain.extents, **(tiles or {})}).moved // ELEMENT


def unfused(chain: Chain) -> int:
    """Elements through memory with each stage a kernel of its own, each reading and writing everything once."""
    return sum(fused(alone) for alone in chain.alone())


def saved(before: int, after: int) -> str:
    return f"{100 * (1 - after / before):.1f}%"


def long_chunk(chunk: int = 4096, width: int = 128) -> Choice:
    """Where the chunk does not fit: the best tiles in 128 KiB, k and n whole, multiples of 16."""
    sizes = range(16, chunk, 16)
    return best(intra_chunk(chunk, width), 128 * KIB, {"m": sizes, "l": sizes, "k": (), "n": ()})


def rows() -> list[str]:
    small = intra_chunk(64, 128)
    wide, narrow = three_stages(64, 128, 16), three_stages(64, 64, 16)
    a100, h100 = Device.named("a100"), Device.named("h100")
    assert a100.tensor_rate is not None
    assert a100.bandwidth is not None
    balance = a100.tensor_rate / a100.bandwidth
    choice = long_chunk()
    rectangle = ELEMENT * (128 * 128 + 64 * 128 + 64 * 128) // KIB

    def intensity(chunk: int) -> float:
        chain = three_stages(chunk, 128, 16)
        return chain.operations / (fused(chain) * ELEMENT)

    table = [
        ("two products, unfused, C 64, d 128, elements", "40960", unfused(small)),
        ("fused, T_M 32, T_L 32, elements", "49152", fused(small, {"m": 32, "l": 32})),
        ("fused, T_M 32, T_L 64, elements", "49152", fused(small, {"m": 32})),
        ("fused, one tile, elements", "not given", fused(small)),
        ("saved by fusing two products, C 64, d 128", "'worse?'", saved(unfused(small), fused(small))),
        ("three stages, unfused, C 64, d 128, n 16, elements", "66560", unfused(wide)),
        ("three stages, fused, elements", "41984", fused(wide)),
        ("saved, three stages, C 64, d 128, n 16", "37% (1.59x)", saved(unfused(wide), fused(wide))),
        ("7Cd + 2C^2 + Cn at C 64, d 64, n 16", "37632", 7 * 64 * 64 + 2 * 64 * 64 + 64 * 16),
        ("three stages, unfused, C 64, d 64, n 16, elements", "37632", unfused(narrow)),
        ("three stages, fused, elements", "17408", fused(narrow)),
        ("saved, three stages, C 64, d 64, n 16", "54%", saved(unfused(narrow), fused(narrow))),
        ("operations a byte, fused, C 64, d 128, n 16", "25.6", f"{intensity(64):.1f}"),
        ("operations a byte, fused, C 256, d 128, n 16", "102", f"{intensity(256):.1f}"),
        ("operations a byte from which an A100 is bound by arithmetic", "about 100", f"{balance:.0f}"),
        (
            "best T_M and T_L, d 128 whole, 128 KiB, C 4096",
            "114 and 114",
            f"{choice.tiles['m']} and {choice.tiles['l']}",
        ),
        ("T_K that fills 128 KiB beside T_M = T_L = 64", "256", (128 * KIB // ELEMENT - 64 * 64) // (2 * (64 + 64))),
        ("tiles of Q, K, V at T_M 128, T_L 64, T_K 128, KiB", "48", rectangle),
        ("S of C 256 and of C 512, bf16, KiB", "64 and 128", f"{256**2 * 2 // KIB} and {512**2 * 2 // KIB}"),
        ("shared memory of a block, A100 and H100, KiB", "128 and 256", f"{shared(a100)} and {shared(h100)}"),
    ]
    return [f"| {what} | {theirs} | {ours} |" for what, theirs, ours in table]


def shared(device: Device) -> int:
    assert device.shared_per_block is not None
    return device.shared_per_block // KIB


if __name__ == "__main__":
    print("\n".join(["| quantity | proposal 032 | the model |", "| --- | --- | --- |", *rows()]))
