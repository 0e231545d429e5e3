"""First calls, each in a child process of its own with empty compile caches: in a warm process nothing is a first call.

What took the children a minute is not compiled again here: their Triton caches are put where this process looks for its
own. PyTorch's extensions cannot be moved, so those are built where they stay; if one was there already, the call is not
taken for a first one.
"""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .case import Case
from .child import write_request
from .selection import Selection, runners_of
from .subject import Runner

# Where compilers and peers keep what they compiled, Holdfast's cubins among it, which lie below HOME.
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "driver",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "XDG_CACHE_HOME": "others",
    "HOME": "home",
}
# what leads PyTorch to the place of its extensions
LEADS_TO_EXTENSIONS = ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "HOME")
# Of one first call; flash-linear-attention's longest take about 100 on an idle machine.
LIMIT_S = 240.0


@dataclass(frozen=True)
class First:
    """seconds: of the first call, None where it did not end well. died: how, if that would have ended this process.
    why: what was said where it only failed or was refused."""

    seconds: float | None
    died: str = ""
    why: str = ""


Firsts = dict[tuple[Case, str], First]


def _kernels(case: Case, runner: Runner) -> tuple[Case, str]:
    """Equal for cases in which the runner runs the same kernels. Holdfast's are made for a width, some peers' for all
    sizes, most for none."""
    if getattr(runner, "per_size", False):
        sizes = case.sizes
    else:
        widths = "KVDCr" if runner.name.startswith("holdfast") else ""
        sizes = tuple((axis, size if axis in widths else 1) for axis, size in case.sizes)
    # an extension holds both passes
    passes = "fwd" if getattr(runner, "extension", False) else case.passes
    return replace(case, sizes=sizes, label="", passes=passes), runner.name


def _ended(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def first_call(case: Case, runner: Runner, device: torch.device, folder: Path, limit: float) -> First:
    """One first call with its caches under folder, of at most limit seconds."""
    extension = getattr(runner, "extension", False)
    kept = LEADS_TO_EXTENSIONS if extension else ()
    settings = [f"{name}={folder / place}" for name, place in CACHES.items() if name not in kept]
    for place in CACHES.values():
        (folder / place).mkdir(parents=True)
    before = _extensions()
    python = [sys.executable, "-m", "holdfast.cli.bench.first_call"]
    request = write_request([(case, runner.name)], device, folder)
    try:
        done = subprocess.run(
            ["env", *settings, "TRITON_CACHE_AUTOTUNING=1", *python, str(request)],
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return First(None, f"the first call took more than {limit:.0f} s")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [""]
        return First(None, f"the first call ended its process: {_ended(done.returncode)} {last[0]}"[:300])
    said = json.loads(done.stdout.strip().splitlines()[-1])
    if "seconds" not in said:
        return First(None, why=next(iter(said.values())))
    if extension and _extensions() == before:
        return First(None, why="its extension was there already")
    return First(said["seconds"])


def _extensions() -> set[Path]:
    """Folders of PyTorch's extensions that were built on this machine."""
    from torch.utils import cpp_extension

    return set(Path(cpp_extension.get_default_build_root()).glob("*/*"))


def _adopt(folder: Path) -> None:
    """Puts the kernels that a child compiled where this process will look for them."""
    from holdfast.kernels.runtime import nvrtc

    mine = nvrtc.folder()
    cubins = folder / CACHES["HOME"] / mine.relative_to(Path.home())
    if cubins.is_dir():
        shutil.copytree(cubins, mine, dirs_exist_ok=True)
    if not any((folder / CACHES["TRITON_CACHE_DIR"]).iterdir()):
        return
    from triton import knobs

    shutil.copytree(folder / CACHES["TRITON_CACHE_DIR"], Path(knobs.cache.dir), dirs_exist_ok=True)
    # an autotuner's choice lies beside its kernels, and is looked for only with this
    knobs.autotuning.cache = True


def first_calls(
    cases: Sequence[Case],
    device: torch.device,
    wanted: Selection,
    side_by_side: int,
    skip: Collection[tuple[Case, str]] = (),
    limit: float = LIMIT_S,
    each: Callable[[str], None] = lambda done: None,
) -> Firsts:
    """The first call of each runner with each set of kernels that these cases take, several at a time.

    skip: cases and runners' names that need none. each: called with a line as one ends. Returns (case, runner) ->
    First.
    """
    jobs: dict[tuple[Case, str], tuple[Case, Runner]] = {}
    for case in cases:
        for runner in runners_of(case, wanted):
            compiles = getattr(runner, "compiles", True) and (case, runner.name) not in skip
            if case.kind == "time" and compiles and not runner.refusal(case, device):
                jobs.setdefault(_kernels(case, runner), (case, runner))
    # what takes longest starts first: peers that search or compile for each size, and both passes before one
    order = sorted(jobs.values(), key=lambda job: (not getattr(job[1], "per_size", False), -len(job[0].passes)))
    found: Firsts = {}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as root:

        def one(number: int) -> None:
            case, runner = order[number]
            first = first_call(case, runner, device, Path(root) / str(number), limit)
            found[case, runner.name] = first
            took = first.died or (f"not measured: {first.why}" if first.seconds is None else f"{first.seconds:.1f} s")
            each(f"{case.op} {case.shape} {case.passes} {runner.name}: {took}")

        with ThreadPoolExecutor(side_by_side) as pool:
            list(pool.map(one, range(len(order))))
        for number in range(len(order)):
            _adopt(Path(root) / str(number))
    return found


def died(found: Firsts, case: Case, runner: Runner) -> str:
    """How the first call ended its process, if it did; the same kernels would end this one."""
    key = _kernels(case, runner)
    for (other, name), first in found.items():
        if name == runner.name and first.died and _kernels(other, runner) == key:
            return first.died
    return ""
