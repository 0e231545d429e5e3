"""Compiles what the suite will run, mixer by mixer in child processes side by side: what they leave in the compilers'
caches is then only loaded."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import torch

from holdfast.kernels.runtime.torch_private import compile_here

from .. import clock
from .mixers import MIXERS, Mixer
from .scale import Scale
from .suite import Suite, lost_after, rows_of

# Of one child; some libraries search among kernels for a minute or more.
LIMIT_S = 240.0
# Each holds a device context and the activations of a block or two.
MOST = 12


def warm(
    mixers: Sequence[Mixer],
    parts: Sequence[str],
    scale: Scale,
    device: torch.device,
    each: Callable[[str], None] = lambda line: None,
    limit: float = LIMIT_S,
) -> None:
    """Waits until every child is done. each: called with a line about a child that did not end well."""
    with tempfile.TemporaryDirectory(prefix="holdfast-models-") as folder:

        def one(mixer: Mixer) -> None:
            request = Path(folder) / f"{mixer.name}.json"
            wanted = {"mixer": mixer.name, "parts": parts, "scale": asdict(scale), "device": str(device)}
            request.write_text(json.dumps(wanted), encoding="utf-8")
            python = [sys.executable, "-m", "holdfast.cli.bench.models.warm", str(request)]
            try:
                done = subprocess.run(python, capture_output=True, text=True, timeout=limit)
            except subprocess.TimeoutExpired:
                each(f"{mixer.name}: not compiled ahead within {limit:.0f} s")
                return
            if done.returncode:
                last = done.stderr.strip().splitlines()[-1:] or [""]
                each(f"{mixer.name}: not compiled ahead, exit status {done.returncode} {last[0]}"[:300])

        side_by_side = max(1, min(MOST, (os.cpu_count() or 1) - 2, len(mixers)))
        # other libraries' take longest
        order = sorted(mixers, key=lambda mixer: mixer.exact)
        with ThreadPoolExecutor(side_by_side) as pool:
            list(pool.map(one, order))
    _keep_autotuned()


def _keep_autotuned() -> None:
    """What others' autotuners chose lies beside their kernels, and is looked for only with this."""
    try:
        from triton import knobs
    except ImportError:
        return
    knobs.autotuning.cache = True


def main() -> None:
    """One block, one layer, one run of everything: the kernels are those of the whole."""
    wanted = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sizes = {name: tuple(x) if isinstance(x, list) else x for name, x in wanted["scale"].items()}
    scale = replace(Scale(**sizes), blocks=1, decode_layers=1, vocabulary=512)
    device = torch.device(wanted["device"])
    compile_here()
    clock.SECONDS, clock.LEAST = 0.0, 2
    _keep_autotuned()
    mixer = next(each for each in MIXERS if each.name == wanted["mixer"])
    suite = Suite(scale, device)
    for part in wanted["parts"]:
        if rows := rows_of(part, mixer, scale, device):
            for row in suite.measure(mixer, rows):
                print(row.part, row.mode, row.status, row.detail, flush=True)
                lost_after(row, device)


if __name__ == "__main__":
    main()
