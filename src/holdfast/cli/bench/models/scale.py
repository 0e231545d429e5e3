"""How large everything of the suite is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Sizes of all that is measured.

    width, blocks, vocabulary: of the language model. head: channels of a head of the matrix recurrences; narrow: of
    attention's, Mamba-2's values' and the cells'. batch, length: of a step; longer: more lengths, at about as many
    tokens. host: batch and length at which host time is taken; checked: at which results are compared. decode_width,
    decode_layers, decode_batches: of decoding, attention's after context tokens. compiler: torch.compile's backend.
    """

    width: int = 768
    head: int = 128
    narrow: int = 64
    blocks: int = 16
    vocabulary: int = 32000
    batch: int = 8
    length: int = 2048
    longer: tuple[int, ...] = (8192, 32768)
    host: tuple[int, int] = (2, 512)
    checked: tuple[int, int] = (2, 256)
    decode_width: int = 1024
    decode_layers: int = 12
    decode_batches: tuple[int, ...] = (1, 64)
    context: int = 2048
    compiler: str = "inductor"

    def batch_of(self, length: int) -> int:
        """Sequences of a length in a step, of as many tokens as the others where one has no more than those."""
        return max(1, self.batch * self.length // length)


FULL = Scale()
# what a CPU gets through; its compiler is left out of it
SMALL = Scale(
    width=32,
    head=16,
    narrow=8,
    blocks=2,
    vocabulary=64,
    batch=2,
    length=16,
    longer=(32,),
    host=(1, 8),
    checked=(1, 16),
    decode_width=32,
    decode_layers=2,
    decode_batches=(1, 2),
    context=16,
    compiler="eager",
)
