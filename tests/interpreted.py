"""Runs a test's body in a child process under Triton's interpreter, so that kernels run on a CPU.

Whether Triton interprets is settled when it is imported. So a process apart imports PyTorch and the kernels for all
tests, once, and forks for each.
"""

import ast
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import NoReturn

_TESTS = Path(__file__).parent


def interpret(module: str, function: str, *arguments: object, seconds: int = 120, shortcuts: bool = True) -> str:
    """Calls module.function(*arguments) in a child with TRITON_INTERPRET set; returns what it printed.

    module: importable from tests or src. arguments: with a repr that evaluates to them. Raises AssertionError with the
    child's output where it fails, or runs for longer. shortcuts: whether the child takes those of Triton's interpreter.
    """
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        print((module, function, arguments, seconds, shortcuts, folder), file=server.stdin, flush=True)
        status = server.stdout.readline().strip()
        printed, errors = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    assert status == "0", f"{module}.{function} ended with {status or 'its server'}:\n{printed}{errors}"
    return printed


@cache
def _server() -> subprocess.Popen[str]:
    """It ends with its standard input, which is this process's."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{_TESTS.parent / 'src'}:{_TESTS}"}
    command = [sys.executable, "-c", "import interpreted; interpreted.serve()"]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve() -> None:
    """Each line of the input is a call, which a child makes; its exit status is a line of the output."""
    import torch

    import holdfast.ops  # noqa: F401  imported for the children
    from interpreter_shortcuts import multiply_bfloat16, read_loop_bounds

    # memory that a kernel leaves unwritten is NaN; this brings torch._dynamo along, for all children
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    read_loop_bounds()
    multiply_bfloat16()
    # nothing of this is garbage, whatever the children make
    gc.freeze()
    gc.set_threshold(100_000)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _make(*ast.literal_eval(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _make(
    module: str, function: str, arguments: tuple[object, ...], seconds: int, shortcuts: bool, folder: str
) -> NoReturn:
    status = 1
    try:
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), descriptor)
        # ends the process
        signal.alarm(seconds)
        if shortcuts:
            interpreter_shortcuts = importlib.import_module("interpreter_shortcuts")
            interpreter_shortcuts.take()
        getattr(importlib.import_module(module), function)(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
