"""The time of each launch of kda's two passes on a GPU: `PYTHONPATH=src python benchmarks/kda_launches.py`.

bfloat16, K = V = 128, g in float32, at the sizes of bench's suite delta; by PyTorch's profiler, a mean of three calls.
"""

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import holdfast

SIZES = ((4, 4096, 32), (1, 8192, 96), (1, 32768, 12))
WIDTH, CALLS = 128, 3


def main() -> None:
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
        print(f"B{batch} T{length} H{heads}, both passes, ms")
        for event in sorted(seen.key_averages(), key=lambda event: -event.device_time_total):
            if event.device_time_total > CALLS:
                print(f"  {event.device_time_total / CALLS / 1e3:.3f}  {event.count // CALLS} x {event.key[:80]}")


if __name__ == "__main__":
    main()
