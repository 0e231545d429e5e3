"""A child process that makes one first call and says how long it took.

    python -m holdfast.cli.bench.first_call REQUEST

The parent starts it with empty compile caches. Importing PyTorch, starting the device and drawing the inputs are not
counted; importing the implementation, planning and compiling are.
"""

import json
import os

import torch

from .child import request
from .clock import seconds_of, synchronize
from .failure import one_line
from .measure import one_pass
from .subject import Refused


def main() -> None:
    """Prints {"seconds": ...}, or {"refused": ...}, or {"failed": ...} with the error in words, as the last line."""
    ((case, runner),), device = request()
    case.arguments(device)
    torch.ones(1, device=device)
    synchronize(device)

    def first() -> None:
        subject = runner.prepare(case, device)
        one_pass(subject.call, subject.inputs, case.passes != "fwd")()

    try:
        said = {"seconds": seconds_of(first, device)}
    except (Refused, ImportError) as reason:
        said = {"refused": one_line(reason)}
    except Exception as error:  # the parent makes a row of it
        said = {"failed": one_line(error)}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
    # a thread of autograd that still lets go of a graph while Python shuts down would abort the process
    # (pytorch/pytorch#38228)
    os._exit(0)
