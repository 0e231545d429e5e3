"""Other libraries' functions are there without those libraries, and cost `import holdfast` nothing."""

import ast
import os
import subprocess
import sys
from pathlib import Path

from source_tree import parse, python_files

SOURCE = Path(__file__).parents[2] / "src"


def test_import_holdfast_brings_none_of_it():
    code = 'import sys, holdfast; print({"torch", "fla", "holdfast.integrations"} & sys.modules.keys())'
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "set()", done


def test_the_modules_import_torch_and_holdfast_alone():
    """Where they are imported; `enable` asks for fla when it is called."""
    found = set()
    for path in python_files(SOURCE / "holdfast" / "integrations"):
        for node in parse(path).body:
            if isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.partition(".")[0])
            elif isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
    assert found - sys.stdlib_module_names == {"torch", "holdfast"}
