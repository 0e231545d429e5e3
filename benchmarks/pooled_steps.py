"""Steps of the gated delta rule on a pool of states: `PYTHONPATH=src python benchmarks/pooled_steps.py [OUT.json]`.

On a GPU: 32 heads, K = V = 128, bfloat16 tokens, batches of 1 to 256 on states of float32, bfloat16 and float16, K or V
last, 1 to 8 tokens. Device times of graph replays, beside a copy of as many bytes as a step reads and writes of states,
timed in the same run. Then, bit for bit: a sequence beside others and alone, and four tokens of which two were accepted
against two steps.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import holdfast
from holdfast.cli.bench.clock import time_runs
from holdfast.cli.bench.record import commit, versions
from holdfast.ops import pooled_step

HEADS, WIDTH, DEVICE = 32, 128, torch.device("cuda")


def arguments(batch: int, tokens: int) -> dict[str, Tensor]:
    shape = (batch, tokens, HEADS)
    q, k, v = torch.randn(3, *shape, WIDTH, device=DEVICE, dtype=torch.bfloat16).unbind()
    g, beta = F.logsigmoid(torch.randn(shape, device=DEVICE) + 3), torch.rand(shape, device=DEVICE)
    return {"q": q, "k": F.normalize(k, dim=-1), "v": v, "g": g, "beta": beta}


def new_pool(slots: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(slots, HEADS, WIDTH, WIDTH, device=DEVICE).to(dtype)


def indices(slots: int, batch: int) -> Tensor:
    return torch.randperm(slots, device=DEVICE)[:batch].to(torch.int32)


def timed(batch: int, tokens: int, dtype: torch.dtype, keys_last: bool) -> dict[str, object]:
    pool, given = new_pool(batch + 8, dtype), arguments(batch, tokens)
    slots = indices(batch + 8, batch)
    step = time_runs(lambda: pooled_step("gated_delta_rule", given, pool, slots, keys_last=keys_last), DEVICE, "graph")
    source, into = pool[:batch], torch.empty_like(pool[:batch])
    copy = time_runs(lambda: into.copy_(source), DEVICE, "graph")
    return {
        "B": batch, "tokens": tokens, "pool": str(dtype).removeprefix("torch."), "keys_last": keys_last,
        "step_ms": step.median_ms, "copy_ms": copy.median_ms, "share_of_copy": copy.median_ms / step.median_ms,
    }  # fmt: skip


def exact(dtype: torch.dtype) -> dict[str, bool]:
    """Whether neighbours do not matter, and whether what was not accepted leaves no trace."""
    given, pool = arguments(64, 4), new_pool(80, dtype)
    slots, alone, again = indices(80, 64), pool.clone(), pool.clone()
    two = torch.full_like(slots, 2)
    o = pooled_step("gated_delta_rule", given, pool, slots, accepted=two)
    rows = [
        pooled_step("gated_delta_rule", cut(given, 0, n), alone, slots[n : n + 1], accepted=two[:1]) for n in range(64)
    ]
    steps = [pooled_step("gated_delta_rule", cut(given, 1, n), again, slots) for n in range(2)]
    return {
        "a sequence does not depend on its neighbours": torch.equal(torch.cat(rows), o) and torch.equal(alone, pool),
        "two of four accepted are two steps": torch.equal(torch.cat(steps, 1), o[:, :2]) and torch.equal(again, pool),
    }


def cut(given: dict[str, Tensor], axis: int, n: int) -> dict[str, Tensor]:
    return {name: x.narrow(axis, n, 1) for name, x in given.items()}


def main() -> None:
    torch.manual_seed(0)
    rows = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for keys_last in (False, True):
            for batch, tokens in ((1, 1), (16, 1), (256, 1), (256, 2), (256, 4), (256, 8)):
                rows.append(timed(batch, tokens, dtype, keys_last))
                print(json.dumps(rows[-1]), flush=True)
    found = {str(dtype).removeprefix("torch."): exact(dtype) for dtype in (torch.float32, torch.bfloat16)}
    print(json.dumps(found))
    if len(sys.argv) > 1:
        record = {"command": "benchmarks/pooled_steps.py", "commit": commit(), "holdfast": holdfast.__version__}
        record |= {"gpu": torch.cuda.get_device_name(), "versions": versions(), "rows": rows, "exact": found}
        Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
