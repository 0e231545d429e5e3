"""Suites of cases, each named after the document whose experiment it repeats."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from holdfast.planner.choices import no_choice

from .case import Case, Pass

BOTH: tuple[Pass, ...] = ("fwd", "fwd+bwd")
# Sizes of a scaled-down case are at most these.
SMALL = {"B": 1, "T": 64, "G": 16, "H": 2, "Hq": 2, "K": 32, "Kg": 32, "V": 32, "D": 64, "N": 16, "C": 64, "r": 8}


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
    # gates are as wide as float32 inputs anyway
    cut = tuple((axis, min(size, SMALL[axis])) for axis, size in case.sizes if axis != "gate_bits")
    return replace(case, sizes=cut, dtype="float32", label=f"{case.op}, scaled down")


def _cases(
    op: str, dtype: str, label: str, passes: tuple[Pass, ...] = BOTH, options: dict[str, Any] | None = None
) -> Callable[[dict[str, int]], Iterator[Case]]:
    def at(sizes: dict[str, int]) -> Iterator[Case]:
        for each in passes:
            yield Case(op, tuple(sizes.items()), dtype, each, label, tuple((options or {}).items()))

    return at


def _error(op: str, dtype: str, sizes: dict[str, int]) -> Case:
    return Case(op, tuple(sizes.items()), dtype, "fwd", f"{op}: error over the steps", kind="error")


def _host(op: str, dtype: str, sizes: dict[str, int], passes: tuple[Pass, ...] = BOTH) -> Iterator[Case]:
    """What a call costs the host, at sizes at which the device has next to nothing to do."""
    for each in passes:
        yield Case(op, tuple(sizes.items()), dtype, each, "host time a call", kind="host")


def _decode(op: str, dtype: str, sizes: dict[str, int], options: tuple[tuple[str, Any], ...] = ()) -> Case:
    """One step with a state that goes in and comes out."""
    step = tuple({"B": sizes["B"], "T": 1, **sizes}.items())
    return Case(op, step, dtype, "fwd", f"{op}: one step of decoding", options, state=True)


def _flashrnn() -> Iterator[Case]:
    for op in ("lstm", "slstm"):
        heads = _cases(op, "bfloat16", f"{op}: head dimension at width 768, B16 T1024")
        for D in (16, 32, 64, 128, 256, 768):
            yield from heads({"B": 16, "T": 1024, "H": 768 // D, "D": D})
        for H, D in ((12, 64), (1, 768)):
            batch = _cases(op, "bfloat16", f"{op}: batch at {H} x {D}, T1024")
            for B in (1, 2, 4, 8, 16, 32, 64, 128, 256):
                yield from batch({"B": B, "T": 1024, "H": H, "D": D})
            length = _cases(op, "bfloat16", f"{op}: length at {H} x {D}, B16")
            for T in (256, 512, 1024, 2048):
                yield from length({"B": 16, "T": T, "H": H, "D": D})
        # appendix H.6: one sequence of 512 steps, one head of 768
        yield _error(op, "bfloat16", {"B": 1, "T": 512, "H": 1, "D": 768})
    # torch.nn.LSTM is at its best in float16
    batch = _cases("lstm", "float16", "lstm float16: batch at 1 x 768, T1024")
    for B in (1, 8, 16, 32, 64, 128):
        yield from batch({"B": B, "T": 1024, "H": 1, "D": 768})
    # heads that no longer fit FlashRNN's fused kernels on smaller GPUs, and one that fits on none of the paper's
    large = _cases("lstm", "bfloat16", "lstm: one large head, B16 T1024")
    for D in (1024, 1536, 2048, 3072):
        yield from large({"B": 16, "T": 1024, "H": 1, "D": D})
    for op in ("gru", "elman"):
        yield from _cases(op, "float16", f"{op} float16: 1 x 768, B16 T1024")({"B": 16, "T": 1024, "H": 1, "D": 768})
    for op in ("lstm", "slstm", "gru", "elman"):
        yield _decode(op, "bfloat16", {"B": 16, "H": 1, "D": 768})
    yield from _host("lstm", "bfloat16", {"B": 1, "T": 1, "H": 1, "D": 64})


def _proposal_032() -> Iterator[Case]:
    at = _cases("intra_chunk", "float16", "intra-chunk, B16 H12 T2048")
    for C, width in ((32, 64), (64, 64), (128, 64), (256, 64), (256, 128)):
        yield from at({"B": 16, "T": 2048, "H": 12, "K": width, "V": width, "C": C})
    # what one chunk of each head takes: the document's microbenchmark
    at = _cases("intra_chunk", "float16", "intra-chunk, one chunk a head, B16 H12")
    for C, width in ((64, 64), (128, 64), (256, 128)):
        yield from at({"B": 16, "T": C, "H": 12, "K": width, "V": width, "C": C})
    # training with the ops that the chunk primitives make up, at the document's sizes
    for op in ("simple_gla", "gla", "gated_delta_rule"):
        yield from _cases(op, "float16", f"{op}, B16 H12 T2048")({"B": 16, "T": 2048, "H": 12, "K": 64, "V": 64})
    yield from _host("intra_chunk", "float16", {"B": 1, "T": 64, "H": 1, "K": 64, "V": 64, "C": 64})


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
    # few heads, as FlashQLA publishes them
    at = _cases("gated_delta_rule", "bfloat16", "gated_delta_rule")
    for T, H in ((4096, 16), (32768, 8)):
        yield from at({"B": 1, "T": T, "H": H, "K": 128, "V": 128})
    yield from _cases("ssd", "bfloat16", "ssd, one group")({"B": 4, "T": 4096, "H": 32, "Hq": 1, "K": 128, "V": 64})
    for op, options in ops:
        yield _decode(op, "bfloat16", {"B": 32, "H": 32, "K": 128, "V": 128}, tuple(options.items()))
    yield _decode("simple_gla", "bfloat16", {"B": 256, "H": 32, "K": 128, "V": 128})
    for op in ("simple_gla", "gated_delta_rule"):
        yield from _host(op, "bfloat16", {"B": 1, "T": 64, "H": 1, "K": 64, "V": 64})


def _proposal_057() -> Iterator[Case]:
    at = _cases("inter_chunk_scan", "bfloat16", "inter-chunk scan, one decay a head, B4 H16 64 x 64")
    for G in (8, 16, 32, 64, 128):
        yield from at({"B": 4, "G": G, "H": 16, "K": 64, "V": 64})
    at = _cases("inter_chunk_scan", "bfloat16", "inter-chunk scan, one decay a row, B4 H16 64 x 64")
    for G in (32, 64, 128):
        yield from at({"B": 4, "G": G, "H": 16, "K": 64, "V": 64, "Kg": 64})
    at = _cases("inter_chunk_scan", "bfloat16", "inter-chunk scan, rank 4 erased, B4 H16 64 x 64")
    yield from at({"B": 4, "G": 64, "H": 16, "K": 64, "V": 64, "r": 4})
    at = _cases("inter_chunk_scan", "bfloat16", "inter-chunk scan, B8 H16 128 x 128")
    yield from at({"B": 8, "G": 64, "H": 16, "K": 128, "V": 128})
    for op in ("hgrn", "rglru", "rotlru"):
        at = _cases(op, "bfloat16", op)
        yield from at({"B": 8, "T": 4096, "D": 2048})
        yield from _cases(op, "bfloat16", f"{op}, bfloat16 gates")({"B": 8, "T": 4096, "D": 2048, "gate_bits": 16})
    for op in ("gla", "gated_delta_rule"):
        at = _cases(op, "bfloat16", f"{op}, B4 H16 64 x 64")
        for T in (2048, 4096, 8192):
            yield from at({"B": 4, "T": T, "H": 16, "K": 64, "V": 64})
    yield from _host("inter_chunk_scan", "bfloat16", {"B": 1, "G": 2, "H": 1, "K": 16, "V": 16})
    yield from _host("rglru", "bfloat16", {"B": 1, "T": 32, "D": 64})


def _mlx_recurrence() -> Iterator[Case]:
    for op, sizes in (
        ("ssd", {"B": 3, "T": 512, "H": 12, "K": 16, "V": 64}),
        ("gla", {"B": 3, "T": 512, "H": 12, "K": 64, "V": 64}),
        ("simple_gla", {"B": 3, "T": 512, "H": 12, "K": 64, "V": 64}),
        ("rglru", {"B": 3, "T": 512, "D": 1536}),
        ("rotlru", {"B": 3, "T": 512, "D": 1536}),
        ("hgrn", {"B": 3, "T": 512, "D": 1536}),
    ):
        yield from _cases(op, "bfloat16", op)(sizes)
    for op in ("rglru", "rotlru", "hgrn"):
        yield from _cases(op, "bfloat16", f"{op}, bfloat16 gates")({"B": 3, "T": 512, "D": 1536, "gate_bits": 16})
    yield from _host("simple_gla", "bfloat16", {"B": 3, "T": 512, "H": 12, "K": 64, "V": 64})
    # the lengths at which a history that is stored grows and one that is recomputed does not
    at = _cases("simple_gla", "bfloat16", "simple_gla: memory over the length, B3 H12 64 x 64", ("fwd+bwd",))
    for T in (2048, 8192):
        yield from at({"B": 3, "T": T, "H": 12, "K": 64, "V": 64})


def _wide_states() -> Iterator[Case]:
    for op in ("simple_gla", "ssd", "gla", "gated_delta_rule", "mlstm"):
        # xLSTM-7B's heads, and those of GatedDeltaNet(768) and RetNet(768) by default
        for sizes in ({"B": 4, "T": 4096, "H": 8, "K": 256, "V": 512}, {"B": 8, "T": 2048, "H": 4, "K": 192, "V": 384}):
            yield from _cases(op, "bfloat16", f"{op}: K {sizes['K']}, V {sizes['V']}")(sizes)


def _delta() -> Iterator[Case]:
    # a training batch, FlashKDA's published one, and what a rank of eight has of Kimi K3's heads
    for sizes in ({"B": 4, "T": 4096, "H": 32}, {"B": 1, "T": 8192, "H": 96}, {"B": 1, "T": 32768, "H": 12}):
        for op in ("kda", "gated_delta_rule"):
            yield from _cases(op, "bfloat16", op)(sizes | {"K": 128, "V": 128})
    # keys that erase beside those that write, and delta rules of twice the tokens
    for op in ("gdn2", "comba", "gated_delta_product", "rwkv7"):
        yield from _cases(op, "bfloat16", op)({"B": 4, "T": 4096, "H": 32, "K": 128, "V": 128})
    yield _decode("kda", "bfloat16", {"B": 32, "H": 32, "K": 128, "V": 128})
    yield from _host("kda", "bfloat16", {"B": 1, "T": 64, "H": 1, "K": 64, "V": 64})


def _selective() -> Iterator[Case]:
    # Mamba-130M's channels in a training batch, Mamba-2.8B's in one long sequence
    for sizes in ({"B": 8, "T": 2048, "D": 1536}, {"B": 1, "T": 16384, "D": 5120}):
        yield from _cases("mamba1", "bfloat16", "mamba1")(sizes | {"N": 16})
    yield _decode("mamba1", "bfloat16", {"B": 64, "D": 5120, "N": 16})
    yield from _host("mamba1", "bfloat16", {"B": 1, "T": 64, "D": 64, "N": 16})


def _smoke() -> Iterator[Case]:
    matrix = _cases("gated_delta_rule", "float32", "gated_delta_rule: length")
    for T in (64, 128, 256):
        yield from matrix({"B": 1, "T": T, "H": 2, "K": 16, "V": 16})
    yield from _cases("simple_gla", "bfloat16", "simple_gla bfloat16")({"B": 1, "T": 128, "H": 2, "K": 16, "V": 16})
    yield from _cases("lstm", "float32", "lstm")({"B": 2, "T": 32, "H": 1, "D": 32})
    yield from _cases("rglru", "float32", "rglru")({"B": 2, "T": 128, "D": 32})
    yield from _cases("rotlru", "float32", "rotlru")({"B": 2, "T": 128, "D": 32})
    at = _cases("inter_chunk_scan", "float32", "inter-chunk scan")
    yield from at({"B": 1, "G": 8, "H": 2, "K": 16, "V": 16})
    yield from at({"B": 1, "G": 8, "H": 2, "K": 16, "V": 16, "Kg": 16})
    yield from at({"B": 1, "G": 8, "H": 2, "K": 16, "V": 16, "r": 4})
    yield from _cases("intra_chunk", "float32", "intra-chunk")({"B": 1, "T": 128, "H": 2, "K": 16, "V": 16, "C": 64})
    yield from _cases("mamba1", "float32", "mamba1")({"B": 2, "T": 64, "D": 32, "N": 16})
    yield _error("lstm", "float32", {"B": 1, "T": 64, "H": 1, "D": 32})
    yield _decode("gla", "float32", {"B": 2, "H": 2, "K": 16, "V": 16})
    yield _decode("ssd", "float32", {"B": 2, "H": 2, "K": 16, "V": 16})
    yield from _host("simple_gla", "float32", {"B": 1, "T": 4, "H": 1, "K": 4, "V": 4})


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
        Suite("delta", "Delta rules", "heads of 128, as the models that use KDA have", _delta),
        Suite("selective", "Selective scans", "channels of Mamba-130M and Mamba-2.8B", _selective),
        Suite(
            "wide-states", "States wider than a kernel's", "heads of xLSTM-7B and of modules' defaults", _wide_states
        ),
    )
}


def suite_named(name: str) -> Suite:
    """The suite of that name; ValueError with the known ones otherwise."""
    try:
        return SUITES[name]
    except KeyError:
        raise ValueError(no_choice("--suite", ["models", *SUITES], name)) from None
