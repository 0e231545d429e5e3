"""Prefill that keeps states behind blocks: `PYTHONPATH=src python benchmarks/pooled_prefill.py [OUT.json]`.

Each way through the blocks, beside the op on the same prompts, which keeps no state but the last. On a GPU one and four
prompts of 8192 and 32768 tokens, 32 heads of K = V = 128 in bfloat16; elsewhere a small case in float32. The rule
between the two ways is `are_better_side_by_side` of holdfast/ops/prefill_blocks.py: "chosen" is the way it takes.
"""

import json
import sys
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import holdfast
from holdfast.cli.bench.clock import time_runs
from holdfast.cli.bench.record import commit, versions
from holdfast.ops import prefill_blocks

GPU = torch.cuda.is_available()
DEVICE, DTYPE = torch.device("cuda" if GPU else "cpu"), torch.bfloat16 if GPU else torch.float32
HEADS, WIDTH = (32, 128) if GPU else (4, 64)
PROMPTS = ((1, 8192), (1, 32768), (4, 8192)) if GPU else ((1, 4096),)
BLOCKS = (64, 128, 256, 512, 1024)


def arguments(op: str, tokens: int) -> dict[str, Tensor]:
    q, k, v = torch.randn(3, 1, tokens, HEADS, WIDTH, device=DEVICE, dtype=DTYPE).unbind()
    given = {"q": q, "k": F.normalize(k, dim=-1), "v": v}
    g = F.logsigmoid(torch.randn(1, tokens, HEADS, device=DEVICE) + 3)
    if op == "gla":
        return given | {"g": g[..., None].expand(-1, -1, -1, WIDTH).contiguous()}
    return given | ({"g": g} if op == "simple_gla" else {"g": g, "beta": torch.rand_like(g)})


def timed(op: str, prompts: int, length: int, block: int) -> dict[str, object]:
    given, count = arguments(op, prompts * length), prompts * (length // block)
    offsets = torch.arange(0, prompts * length + 1, length, device=DEVICE)
    pool = torch.zeros(prompts + count, HEADS, WIDTH, WIDTH, device=DEVICE, dtype=DTYPE)
    none = torch.full((prompts,), -1, dtype=torch.int32, device=DEVICE)
    last, kept = torch.arange(prompts + count, dtype=torch.int32, device=DEVICE).split([prompts, count])

    def prefill() -> Tensor:
        return holdfast.pooled_prefill(op, given, pool, none, offsets, last, block=block, block_slots=kept)

    chosen = prefill_blocks.are_better_side_by_side(DEVICE, prompts * block * HEADS * WIDTH, length // block)
    row: dict[str, object] = {"op": op, "prompts": prompts, "T": length, "block": block}
    row["chosen"] = "side by side" if chosen else "in series"
    for name, way in (("in series", False), ("side by side", True)):
        with patch.object(prefill_blocks, "are_better_side_by_side", lambda *_, way=way: way):
            row[f"{name}, ms"] = round(time_runs(prefill, DEVICE).median_ms, 4)
    whole = lambda: getattr(holdfast, op)(**given, output_final_state=True, cu_seqlens=offsets)  # noqa: E731
    return row | {"op alone, ms": round(time_runs(whole, DEVICE).median_ms, 4)}


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    rows = []
    for op in ("simple_gla", "gla", "gated_delta_rule"):
        for prompts, length in PROMPTS:
            for block in BLOCKS:
                rows.append(timed(op, prompts, length, block))
                print(json.dumps(rows[-1]), flush=True)
    if len(sys.argv) > 1:
        record = {"command": "benchmarks/pooled_prefill.py", "commit": commit(), "holdfast": holdfast.__version__}
        record |= {"device": torch.cuda.get_device_name() if GPU else "cpu", "versions": versions(), "rows": rows}
        Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
