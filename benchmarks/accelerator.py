"""Runs every suite on an accelerator, cut to the cases that matter, in one go.

    PYTHONPATH=src python benchmarks/accelerator.py --commit 1a2b3c4

The suites hold more cases, and the peers compile for minutes in each; what is left out here is left out by name below.
Arguments beyond these go to `holdfast bench`, such as --seconds 1, or --out of one --suite.
"""

import shlex
import sys

SUITES = ("proposal-039", "proposal-057", "flashrnn", "proposal-032", "mlx-recurrence")
CASES = (
    # the shape of the document, a short batch, a long sequence; decoding; what a call costs the host
    "B4 T4096 H32 K128",
    "simple_gla B1 T4096 H8",
    "simple_gla B1 T32768",
    "simple_gla B8 T2048",
    "gated_delta_rule B1 T4096 H16",
    "gated_delta_rule B1 T32768 H8",
    "ssd B4 T4096 H32 Hq1",
    "one step of decoding",
    "host time",
    # scans
    "G32 H16 K64 V64 bf",
    "G64 H16",
    "G128 H16 K64 V64 bf",
    "hgrn B8",
    "rglru B8",
    "rotlru B8",
    "gla B4 T4096 H16",
    "gated_delta_rule B4 T4096 H16",
    # cells: the head dimension, the batch and heads that are large in full, sLSTM, GRU and Elman at a few sizes
    "T1024: lstm",
    "B16 T1024: slstm B16 T1024 H12",
    "B16 T1024: slstm B16 T1024 H1 D768",
    "gru float16",
    "elman float16",
    "error over the steps",
    # inside chunks
    "T2048 H12 K64 V64 C64",
    "T2048 H12 K64 V64 C128",
    "T2048 H12 K128",
    "one chunk a head",
    # memory
    "B3 T512",
    "memory over the length",
)
RUNNERS = (
    # right everywhere and slow there
    "-holdfast reference",
    "-holdfast alternating",
    "-holdfast loop",
    "-holdfast chunked",
    *(f"-holdfast triton@{text}" for text in ("lstm: batch", "lstm float16", "one large head")),
    "-torch.compile",
    # they compile anew for each size, for 20 to 100 s
    "-flashrnn alternating",
    "-flashrnn triton_fused",
    *(f"-flashrnn@{text}" for text in ("slstm", "elman", "H48", "H24", "H6", "H3", "D1024")),
    *(f"-flashrnn@{text}" for text in ("lstm: batch", "lstm float16", "one large head", "error")),
    *(f"-fla@{text}" for text in ("B1 T", "B3 T", "B4 T4096 H16", ": delta_rule")),
    "-fla chunk@one step",
    *(f"-fla fused_recurrent@{text}" for text in ("B4 T4096 H32", "hgrn")),
    # more than four minutes for a first call
    "-fla chunk@: gla B4 T4096 H32 K128 V128 bfloat16 fwd+bwd",
    *(f"-mamba_ssm ssd@{text}" for text in ("B3 T512", "one step")),
    "-accelerated-scan warp",
    # there for scale, once
    "-torch SDPA@B3 T512",
    "-torch SDPA@memory over the length",
    "-torch SDPA@one step",
)
COUNTERS = (
    "holdfast@simple_gla B4 T4096 H32",
    "holdfast@gated_delta_rule B4 T4096 H32",
    "holdfast@mlstm gating=sigmoid B4",
    "fla chunk@gated_delta_rule B4 T4096 H32",
    "holdfast@B4 G64 H16 K64 V64 bf",
    "mamba_ssm state passing@B4 G64 H16 K64 V64 bf",
    "holdfast@rglru B8",
    "holdfast@rotlru B8",
    "holdfast@T2048 H12 K64 V64 C64",
    "torch separate kernels@T2048 H12 K64 V64 C64",
    "holdfast@B16 T1024: lstm B16 T1024 H12",
)


def arguments() -> list[str]:
    """Of `holdfast bench`."""
    options = {
        "--suite": SUITES,
        "--match": CASES,
        "--runners": RUNNERS,
        "--counters": COUNTERS,
        "--cold": ("16",),
        "--seconds": ("0.1",),
    }
    return ["bench", *(f"{name}={','.join(values)}" for name, values in options.items())]


if __name__ == "__main__":
    from holdfast.cli import main

    sys.argv = ["holdfast", *arguments(), *sys.argv[1:]]
    print(shlex.join(sys.argv))
    main()
