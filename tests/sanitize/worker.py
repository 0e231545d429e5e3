"""Runs some of the calls in one process, on the GPU that is there: what a sanitizer watches.

`python -m sanitize.worker OUT TOOL N...`: calls by number, under a tool or, with TOOL "", alone. OUT, a JSON file, says
after each call which ones ran, which failed and how, which kernels were launched, and of which of them the assembler's
list of mbarriers was put right. It stops at a call after which CUDA works no more, and says so.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from holdfast.kernels.runtime import nvrtc

from .barrier_tables import with_right_tables
from .calls import CALLS, planned
from .launched import noted
from .sources import HOUSE, KERNELS
from .tma_writes import counted_as_written

# begins a line that says which call the lines after it are of
MARK = "@@ "


def with_lines() -> None:
    """Has CUDA C++ compiled with the places of its source, file by file, as Triton's kernels always are."""
    compile_source = nvrtc.compile_source
    parts = {name: (KERNELS / file).read_text(encoding="utf-8") for name, file in HOUSE.line_names.items()}

    def compile_with_lines(text: str, arch: str, options: Any = (), store: Any = None) -> nvrtc.Cubin:
        for name, part in parts.items():
            text = text.replace(part, f'#line 1 "{name}"\n{part}\n#line 1 "made.cu"\n')
        return compile_source(text, arch, (*options, "--generate-line-info"), store)

    nvrtc.compile_source = compile_with_lines


def main(out: Path, tool: str, numbers: list[int]) -> None:
    with_lines()
    device = torch.device("cuda", 0)
    done: list[int] = []
    failed: dict[int, str] = {}
    torch.zeros(1, device=device)
    seen = counted_as_written() if tool == "initcheck" else nullcontext()
    with noted() as kernels, with_right_tables() as put_right, seen:
        for number in numbers:
            call = CALLS[number]
            print(f"{MARK}{call.name}", flush=True)
            try:
                with planned(call.plan):
                    call.run(device)
            except Exception as failure:  # whatever a call raises is what the report has to say
                failed[number] = f"{type(failure).__name__}: {failure}"[:1000]
                print(f"failed: {failed[number]}", flush=True)
            done.append(number)
            works = _works()
            if not works:
                failed.setdefault(number, "CUDA works no more after it")
            # at once, as the process may be ended at any time
            part = out.with_suffix(".part")
            said = {"done": done, "failed": failed, "kernels": sorted(kernels), "put right": put_right}
            part.write_text(json.dumps(said | {"stopped": not works}))
            part.replace(out)
            if not works:
                sys.exit(3)
    print(f"{MARK}end", flush=True)


def _works() -> bool:
    try:
        torch.cuda.synchronize()
        return bool(torch.ones(1, device="cuda").item())
    except RuntimeError:
        return False


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [int(number) for number in sys.argv[3:]])
