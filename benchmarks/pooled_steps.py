"""Steps on a pool of states: `PYTHONPATH=src python benchmarks/pooled_steps.py [OUT.json]`.

On a GPU: the gated delta rule and mLSTM of 32 heads, K = V = 128, and hgrn of 4096 channels; bfloat16 tokens, batches
of 1 to 256 on states of float32, bfloat16 and float16, K or V last, 1 to 8 tokens. Device times of graph replays,
beside a copy of as many bytes as a step reads and writes of states, timed in the same run. Then, bit for bit: a
sequence beside others and alone, and four tokens of which two were accepted against two steps.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import holdfast
from holdfast.cli.bench.clock import time_runs
from holdfast.cli.bench.record import commit, versions
from holdfast.ops import pooled_step

HEADS, WIDTH, CHANNELS, DEVICE = 32, 128, 4096, torch.device("cuda")
OPS = ("gated_delta_rule", "mlstm", "hgrn")
Pool = Sequence[Tensor]


def arguments(op: str, batch: int, tokens: int) -> dict[str, Tensor]:
    if op == "hgrn":
        x = torch.randn(batch, tokens, CHANNELS, device=DEVICE, dtype=torch.bfloat16)
        return {"x": x, "g": F.logsigmoid(torch.randn(x.shape, device=DEVICE) + 3)}
    shape = (batch, tokens, HEADS)
    q, k, v = torch.randn(3, *shape, WIDTH, device=DEVICE, dtype=torch.bfloat16).unbind()
    given = {"q": q, "k": F.normalize(k, dim=-1), "v": v}
    if op == "mlstm":
        return given | {"i": torch.randn(shape, device=DEVICE), "f": torch.randn(shape, device=DEVICE) + 3}
    return given | {"g": F.logsigmoid(torch.randn(shape, device=DEVICE) + 3), "beta": torch.rand(shape, device=DEVICE)}


def new_pool(op: str, slots: int, dtype: torch.dtype) -> Pool:
    """The op's states, the largest first."""
    if op == "hgrn":
        return (torch.randn(slots, CHANNELS, device=DEVICE).to(dtype),)
    first = torch.randn(slots, HEADS, WIDTH, WIDTH, device=DEVICE).to(dtype)
    if op != "mlstm":
        return (first,)
    n, m = torch.randn(slots, HEADS, WIDTH, device=DEVICE).to(dtype), torch.randn(slots, HEADS, device=DEVICE)
    return (first, n, m)


def step(op: str, given: dict[str, Tensor], pool: Pool, slots: Tensor, **options: object) -> Tensor:
    return pooled_step(op, given, tuple(pool) if len(pool) > 1 else pool[0], slots, **options)


def indices(slots: int, batch: int) -> Tensor:
    return torch.randperm(slots, device=DEVICE)[:batch].to(torch.int32)


def timed(op: str, batch: int, tokens: int, dtype: torch.dtype, keys_last: bool) -> dict[str, object]:
    pool, given = new_pool(op, batch + 8, dtype), arguments(op, batch, tokens)
    slots = indices(batch + 8, batch)
    taken = time_runs(lambda: step(op, given, pool, slots, keys_last=keys_last), DEVICE, "graph")
    source, into = pool[0][:batch], torch.empty_like(pool[0][:batch])
    copy = time_runs(lambda: into.copy_(source), DEVICE, "graph")
    return {
        "op": op, "B": batch, "tokens": tokens, "pool": str(dtype).removeprefix("torch."), "keys_last": keys_last,
        "step_ms": taken.median_ms, "copy_ms": copy.median_ms, "share_of_copy": copy.median_ms / taken.median_ms,
    }  # fmt: skip


def exact(op: str, dtype: torch.dtype) -> dict[str, bool]:
    """Whether neighbours do not matter, and whether what was not accepted leaves no trace."""
    given, pool = arguments(op, 64, 4), new_pool(op, 80, dtype)
    slots, alone, again = indices(80, 64), [x.clone() for x in pool], [x.clone() for x in pool]
    two = torch.full_like(slots, 2)
    o = step(op, given, pool, slots, accepted=two)
    rows = [step(op, cut(given, 0, n), alone, slots[n : n + 1], accepted=two[:1]) for n in range(64)]
    steps = [step(op, cut(given, 1, n), again, slots) for n in range(2)]
    return {
        "a sequence does not depend on its neighbours": torch.equal(torch.cat(rows), o) and equal(alone, pool),
        "two of four accepted are two steps": torch.equal(torch.cat(steps, 1), o[:, :2]) and equal(again, pool),
    }


def equal(one: Pool, other: Pool) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def cut(given: dict[str, Tensor], axis: int, n: int) -> dict[str, Tensor]:
    return {name: x.narrow(axis, n, 1) for name, x in given.items()}


def main() -> None:
    torch.manual_seed(0)
    rows = []
    for op in OPS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for keys_last in (False,) if op == "hgrn" else (False, True):
                for batch, tokens in ((1, 1), (16, 1), (256, 1), (256, 2), (256, 4), (256, 8)):
                    rows.append(timed(op, batch, tokens, dtype, keys_last))
                    print(json.dumps(rows[-1]), flush=True)
    found = {
        f"{op} {str(dtype).removeprefix('torch.')}": exact(op, dtype)
        for op in OPS
        for dtype in (torch.float32, torch.bfloat16)
    }
    print(json.dumps(found))
    if len(sys.argv) > 1:
        record = {"command": "benchmarks/pooled_steps.py", "commit": commit(), "holdfast": holdfast.__version__}
        record |= {"gpu": torch.cuda.get_device_name(), "versions": versions(), "rows": rows, "exact": found}
        Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
