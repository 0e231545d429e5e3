"""What holdfast.nn.patch saves: models of transformers by themselves and patched, side by side on this machine.

    python benchmarks/patched_models.py --device cuda --dtype bfloat16 --length 4096 --out times.json

Each model has four layers of a published model's widths with random weights, no experts and a small vocabulary. By
themselves they run what transformers runs with the packages that are installed, which the output names: without
flash-linear-attention, mamba-ssm and causal-conv1d that is transformers' own PyTorch code. Prefill and a step of
training (forward and backward) are of one sequence; decoding is of one token a call with the model's cache, launched
from Python. Times are medians in milliseconds; memory is the peak beyond weights, their gradients and the inputs, in
MiB, on a GPU.
"""

import argparse
import copy
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import holdfast
from holdfast.nn import patch
from holdfast.planner.whole_file import write_text

PEERS = ("fla", "mamba_ssm", "causal_conv1d")
VOCABULARY = 1024


def qwen3_next() -> torch.nn.Module:
    config = transformers.Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=4,
        mlp_only_layers=[0, 1, 2, 3],
        num_attention_heads=16,
        num_key_value_heads=2,
    )
    return transformers.Qwen3NextForCausalLM(config)


def mamba2() -> torch.nn.Module:
    # chunks of 64: transformers' own code writes products of chunk x chunk x heads x state out
    config = transformers.Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=2048, num_hidden_layers=4, num_heads=64, n_groups=1, chunk_size=64
    )
    return transformers.Mamba2ForCausalLM(config)


MODELS = {"Qwen3-Next": qwen3_next, "Mamba-2": mamba2}


def prefill(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(ids, use_cache=True).logits

    return run


def training(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        output = model(ids, labels=ids, use_cache=False)
        output.loss.backward()
        return output.logits.detach()

    return run


def decoding(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    with torch.no_grad():
        output = model(ids[:, :64], use_cache=True)
    key = next(key for key in ("past_key_values", "cache_params") if output.get(key) is not None)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(ids[:, 64:65], use_cache=True, **{key: output[key]}).logits

    return run


PASSES = {"prefill": prefill, "training": training, "decoding": decoding}


def measure(run: Callable[[], torch.Tensor], device: str, seconds: float) -> dict[str, float]:
    """Median milliseconds, and the peak of memory."""
    on_gpu = device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    run()
    wait()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    found = {"ms": statistics.median(times), "runs": len(times)}
    return found | ({"MiB": (torch.cuda.max_memory_allocated() - before) / 2**20} if on_gpu else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--length", type=int, default=4096, help="tokens of the sequence")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seconds", type=float, default=0.5, help="measured a row")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()

    versions = {module.__name__: module.__version__ for module in (torch, transformers, holdfast)}
    peers = [peer for peer in PEERS if importlib.util.find_spec(peer)]
    device = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    about = {"device": device, "dtype": options.dtype, "length": options.length, "versions": versions, "peers": peers}
    rows = []
    for name in options.models:
        torch.manual_seed(0)
        with torch.device(options.device):
            own = MODELS[name]().to(getattr(torch, options.dtype))
            ids = torch.randint(VOCABULARY, (1, options.length))
        patched = copy.deepcopy(own)
        patch(patched)
        for what, prepare in PASSES.items():
            row = {"model": name, "pass": what}
            for runner, model in (("by itself", own), ("patched", patched)):
                row[runner] = measure(prepare(model, ids), options.device, options.seconds)
            rows.append(row)
            times = ", ".join(f"{runner} {row[runner]['ms']:.3f} ms" for runner in ("by itself", "patched"))
            print(f"{name} {what} T{options.length} {options.dtype}: {times}", flush=True)
            if options.out:
                write_text(options.out, json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
