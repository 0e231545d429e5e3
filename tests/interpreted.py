"""Runs a test's body in a child process under Triton's interpreter, so that kernels run on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

_TESTS = Path(__file__).parent

# triton.runtime.interpreter reads a loop bound with int() of an array of one element, which NumPy 2.4 refuses
_PRELUDE = """
import triton.runtime.interpreter as interpreter

patch = interpreter._patch_lang_tensor

def patched(tensor, scope):
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

interpreter._patch_lang_tensor = patched
"""


def interpret(module: str, function: str, *arguments: object, seconds: float = 120) -> str:
    """Calls module.function(*arguments) in a child with TRITON_INTERPRET set; returns what it printed.

    module: importable from tests or src. arguments: with a repr that evaluates to them. Raises AssertionError with the
    child's output where it fails.
    """
    call = f"from {module} import {function}\n{function}(*{arguments!r})"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{_TESTS.parent / 'src'}:{_TESTS}"}
    child = subprocess.run(
        [sys.executable, "-c", f"{_PRELUDE}\n{call}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    return child.stdout
