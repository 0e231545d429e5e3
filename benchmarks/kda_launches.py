"""The time of each launch of kda's two passes on a GPU: `PYTHONPATH=src python benchmarks/kda_launches.py [--triton]`.

bfloat16, K = V = 128, g in float32, at the sizes of bench's suite delta; by PyTorch's profiler, a mean of three calls,
and all of it by events. --triton: without the launches that Hopper has of its own.
"""

import argparse

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import holdfast
from holdfast.cli.bench.clock import device_times
from holdfast.kernels.matrix.vector_decay.triton.delta import launch as launches

SIZES = ((4, 4096, 32), (1, 8192, 96), (1, 32768, 12))
WIDTH, CALLS = 128, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--triton", action="store_true")
    if parser.parse_args().triton:
        launches.hopper_serves = lambda call, cu_seqlens: False
    torch.manual_seed(0)
    for batch, length, heads in SIZES:
        q, k, v = torch.randn(3, batch, length, heads, WIDTH, device="cuda").unbind()
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        g = F.logsigmoid(torch.randn(v.shape, device="cuda") + 3)
        beta = torch.rand(v.shape[:3], device="cuda")
        given = [x.requires_grad_() for x in (*(x.bfloat16() for x in (q, k, v)), g, beta)]
        do = torch.randn_like(given[2])

        def both(given: list[torch.Tensor] = given, do: torch.Tensor = do) -> None:
            torch.autograd.grad(holdfast.kda(*given)[0], given, do)

        both()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            for _ in range(CALLS):
                both()
            torch.cuda.synchronize()
        times, _, _ = device_times(both, torch.device("cuda"))
        print(f"B{batch} T{length} H{heads}, both passes: {times.median_ms:.3f} ms")
        for event in sorted(seen.key_averages(), key=lambda event: -event.device_time_total):
            if event.device_time_total > CALLS:
                print(f"  {event.device_time_total / CALLS / 1e3:.3f}  {event.count // CALLS} x {event.key[:80]}")


if __name__ == "__main__":
    main()
