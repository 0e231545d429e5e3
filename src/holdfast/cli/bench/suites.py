"""Suites of cases, each named after the document whose experiment it repeats."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .case import Case, Pass

BOTH: tuple[Pass, ...] = ("fwd", "fwd+bwd")
# Sizes of a scaled-down case are at most these.
SMALL = {"B": 1, "T": 128, "G": 16, "H": 2, "Hq": 2, "K": 32, "V": 32, "D": 64, "C": 64}


@dataclass(frozen=True)
class Suite:
    """Cases and where they come from. small: whether a CPU gets through them as they are."""

    name: str
    title: str
    source: str
    make: Callable[[], Iterator[Case]]
    small: bool = False

    def cases(self, scaled: bool = False) -> list[Case]:
        """All of them; scaled: with each size cut to SMALL, equal ones once."""
        found = list(self.make())
        return list(dict.fromkeys(scale(case) for case in found)) if scaled else found


def scale(case: Case) -> Case:
    """The same op at sizes that a CPU gets through, in float32, so that dtypes that it only emulates are not timed."""
    cut = tuple((axis, min(size, SMALL[axis])) for axis, size in case.sizes)
    return replace(case, sizes=cut, dtype="float32", label=f"{case.op}, scaled down")


def _cases(
    op: str, dtype: str, label: str, passes: tuple[Pass, ...] = BOTH, options: dict[str, Any] | None = None
) -> Callable[[dict[str, int]], Iterator[Case]]:
    def at(sizes: dict[str, int]) -> Iterator[Case]:
        for each in passes:
            yield Case(op, tuple(sizes.items()), dtype, each, label, tuple((options or {}).items()))

    return at


def _flashrnn() -> Iterator[Case]:
    for op in ("lstm", "slstm"):
        heads = _cases(op, "bfloat16", f"{op}: head dimension at width 768, B16 T1024")
        for D in (16, 32, 64, 128, 256, 768):
            yield from heads({"B": 16, "T": 1024, "H": 768 // D, "D": D})
        for H, D in ((12, 64), (1, 768)):
            batch = _cases(op, "bfloat16", f"{op}: batch at {H} x {D}, T1024")
            for B in (2, 4, 8, 16, 32, 64, 128, 256):
                yield from batch({"B": B, "T": 1024, "H": H, "D": D})
            length = _cases(op, "bfloat16", f"{op}: length at {H} x {D}, B16")
            for T in (256, 512, 1024, 2048):
                yield from length({"B": 16, "T": T, "H": H, "D": D})
    # torch.nn.LSTM is at its best in float16
    batch = _cases("lstm", "float16", "lstm float16: batch at 1 x 768, T1024")
    for B in (1, 8, 16, 32, 64, 128):
        yield from batch({"B": B, "T": 1024, "H": 1, "D": 768})
    for op in ("gru", "elman"):
        yield from _cases(op, "float16", f"{op} float16: 1 x 768, B16 T1024")({"B": 16, "T": 1024, "H": 1, "D": 768})


def _proposal_032() -> Iterator[Case]:
    at = _cases("intra_chunk", "float16", "intra-chunk, B16 H12 T2048")
    for C, width in ((32, 64), (64, 64), (128, 64), (256, 64), (256, 128)):
        yield from at({"B": 16, "T": 2048, "H": 12, "K": width, "V": width, "C": C})
    # what one chunk of each head takes: the document's microbenchmark
    at = _cases("intra_chunk", "float16", "intra-chunk, one chunk a head, B16 H12")
    for C, width in ((64, 64), (128, 64), (256, 128)):
        yield from at({"B": 16, "T": C, "H": 12, "K": width, "V": width, "C": C})


def _proposal_039() -> Iterator[Case]:
    ops: tuple[tuple[str, dict[str, Any]], ...] = (
        ("simple_gla", {}),
        ("gla", {}),
        ("mlstm", {"gating": "sigmoid"}),
        ("mlstm", {}),
        ("delta_rule", {}),
        ("gated_delta_rule", {}),
        ("ssd", {}),
    )
    shapes = ((4, 4096, 32, 128), (1, 4096, 8, 128), (1, 32768, 16, 128), (8, 2048, 16, 64))
    for op, options in ops:
        gate = f" {options['gating']} gate" if options else ""
        at = _cases(op, "bfloat16", f"{op}{gate}", options=options)
        for B, T, H, width in shapes:
            yield from at({"B": B, "T": T, "H": H, "K": width, "V": width})
    yield from _cases("ssd", "bfloat16", "ssd, one group")({"B": 4, "T": 4096, "H": 32, "Hq": 1, "K": 128, "V": 64})


def _proposal_057() -> Iterator[Case]:
    at = _cases("inter_chunk_scan", "bfloat16", "inter-chunk scan, B4 H16 64 x 64")
    for G in (8, 16, 32, 64, 128):
        yield from at({"B": 4, "G": G, "H": 16, "K": 64, "V": 64})
    at = _cases("inter_chunk_scan", "bfloat16", "inter-chunk scan, B8 H16 128 x 128")
    yield from at({"B": 8, "G": 64, "H": 16, "K": 128, "V": 128})
    for op in ("hgrn", "rglru"):
        at = _cases(op, "bfloat16", op)
        yield from at({"B": 8, "T": 4096, "D": 2048})
    for op in ("gla", "gated_delta_rule"):
        at = _cases(op, "bfloat16", f"{op}, B4 H16 64 x 64")
        for T in (2048, 4096, 8192):
            yield from at({"B": 4, "T": T, "H": 16, "K": 64, "V": 64})


def _mlx_recurrence() -> Iterator[Case]:
    for op, sizes in (
        ("ssd", {"B": 3, "T": 512, "H": 12, "Hq": 1, "K": 64, "V": 64}),
        ("gla", {"B": 3, "T": 512, "H": 12, "K": 64, "V": 64}),
        ("simple_gla", {"B": 3, "T": 512, "H": 12, "K": 64, "V": 64}),
        ("rglru", {"B": 3, "T": 512, "D": 1536}),
        ("rotlru", {"B": 3, "T": 512, "D": 1536}),
        ("hgrn", {"B": 3, "T": 512, "D": 1536}),
    ):
        yield from _cases(op, "bfloat16", op)(sizes)


def _smoke() -> Iterator[Case]:
    matrix = _cases("gated_delta_rule", "float32", "gated_delta_rule: length")
    for T in (64, 128, 256):
        yield from matrix({"B": 1, "T": T, "H": 2, "K": 16, "V": 16})
    yield from _cases("simple_gla", "bfloat16", "simple_gla bfloat16")({"B": 1, "T": 128, "H": 2, "K": 16, "V": 16})
    yield from _cases("lstm", "float32", "lstm")({"B": 2, "T": 32, "H": 1, "D": 32})
    yield from _cases("rglru", "float32", "rglru")({"B": 2, "T": 128, "D": 32})
    yield from _cases("inter_chunk_scan", "float32", "inter-chunk scan")({"B": 1, "G": 8, "H": 2, "K": 16, "V": 16})
    yield from _cases("intra_chunk", "float32", "intra-chunk")({"B": 1, "T": 128, "H": 2, "K": 16, "V": 16, "C": 64})


SUITES = {
    suite.name: suite
    for suite in (
        Suite("smoke", "A bit of everything, small", "for tests and CPUs", _smoke, small=True),
        Suite(
            "flashrnn",
            "LSTM and sLSTM over head dimension, batch and length",
            "the experiments of the FlashRNN paper (Pöppel, Beck, Hochreiter 2024, arXiv:2412.07752)",
            _flashrnn,
        ),
        Suite(
            "proposal-032", "The computation inside chunks", "shapes of proposal 032: GEMM-chain fusion", _proposal_032
        ),
        Suite(
            "proposal-039", "Matrix recurrences", "shapes of proposal 039: chunkwise kernels for Hopper", _proposal_039
        ),
        Suite(
            "proposal-057", "Scans of states and channels", "shapes of proposal 057: scan held on chip", _proposal_057
        ),
        Suite(
            "mlx-recurrence",
            "The scans of mlx-recurrence",
            "that library's shape: batch 3, length 512",
            _mlx_recurrence,
        ),
    )
}


def suite_named(name: str) -> Suite:
    """The suite of that name; ValueError with the known ones otherwise."""
    try:
        return SUITES[name]
    except KeyError:
        raise ValueError(f"--suite: expected one of {', '.join(SUITES)}; got {name!r}") from None
